#include "kernels/norm/norm_impl.h"

namespace encast {

void norm_f32_avx2(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  avx2::norm_rows(args, row_begin, row_end);
}

}  // namespace encast
