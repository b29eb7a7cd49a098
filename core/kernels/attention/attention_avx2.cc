#include "kernels/attention/attention_impl.h"

namespace encast {

void attention_f32_6x16_avx2(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                             int64_t query_end, void* scratch) {
  avx2::attention<6, 1>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
