#include "kernels/gated/gated_impl.h"

namespace encast {

void gated_f32_avx512(const GatedArgs& args, int64_t row_begin, int64_t row_end) {
  avx512::gated_rows(args, row_begin, row_end);
}

}  // namespace encast
