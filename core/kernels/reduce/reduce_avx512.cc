#include "kernels/reduce/reduce_impl.h"

namespace encast {

void reduce_pool_f32_avx512(const PoolArgs& args, int64_t seq_begin, int64_t seq_end) {
  avx512::pool_rows(args, seq_begin, seq_end);
}

void reduce_gather_f32_avx512(const GatherArgs& args, int64_t row_begin, int64_t row_end) {
  avx512::gather_rows(args, row_begin, row_end);
}

void reduce_normalize_f32_avx512(const NormalizeArgs& args, int64_t row_begin, int64_t row_end) {
  avx512::normalize_rows(args, row_begin, row_end);
}

}  // namespace encast
