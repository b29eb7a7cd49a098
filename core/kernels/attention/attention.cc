#include "kernels/attention/attention.h"

#include <algorithm>

#include "kernels/attention/scratch.h"

namespace encast {

int64_t attention_scratch_bytes(int64_t max_len, int64_t head_dim) {
  return std::max(scratch_parts(max_len, head_dim).floats() * static_cast<int64_t>(sizeof(float)),
                  narrow_parts(max_len, head_dim, 2, true).bytes());
}

}  // namespace encast
