#include "kernels/rotary/rotary_impl.h"

namespace encast {

void rotary_f32_avx512(const RotaryArgs& args, int64_t row_begin, int64_t row_end) {
  avx512::rotary_rows(args, row_begin, row_end);
}

}  // namespace encast
