#include "kernels/gated/gated_impl.h"

namespace encast {

void gated_f32_avx2(const GatedArgs& args, int64_t row_begin, int64_t row_end) {
  avx2::gated_rows(args, row_begin, row_end);
}

}  // namespace encast
