#include "kernels/gated/gated_impl.h"

namespace encast {

void gated_f32_scalar(const GatedArgs& args, int64_t row_begin, int64_t row_end) {
  scalar::gated_rows(args, row_begin, row_end);
}

}  // namespace encast
