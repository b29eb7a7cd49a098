#include "kernels/attention/attention_impl.h"

namespace encast {

void attention_f32_4x16_scalar(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                               int64_t query_end, void* scratch) {
  scalar::attention<4, 1>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
