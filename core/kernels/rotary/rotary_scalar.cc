#include "kernels/rotary/rotary_impl.h"

namespace encast {

void rotary_f32_scalar(const RotaryArgs& args, int64_t row_begin, int64_t row_end) {
  scalar::rotary_rows(args, row_begin, row_end);
}

}  // namespace encast
