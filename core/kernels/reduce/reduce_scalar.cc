#include "kernels/reduce/reduce_impl.h"

namespace encast {

void reduce_pool_f32_scalar(const PoolArgs& args, int64_t seq_begin, int64_t seq_end) {
  scalar::pool_rows(args, seq_begin, seq_end);
}

void reduce_gather_f32_scalar(const GatherArgs& args, int64_t row_begin, int64_t row_end) {
  scalar::gather_rows(args, row_begin, row_end);
}

void reduce_normalize_f32_scalar(const NormalizeArgs& args, int64_t row_begin, int64_t row_end) {
  scalar::normalize_rows(args, row_begin, row_end);
}

}  // namespace encast
