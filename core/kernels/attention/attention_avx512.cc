#include "kernels/attention/attention_impl.h"

namespace encast {

void attention_f32_6x64_avx512(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                               int64_t query_end, void* scratch) {
  avx512::attention<6, 4>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
