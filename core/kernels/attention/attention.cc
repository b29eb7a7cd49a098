#include "kernels/attention/attention.h"

#include <algorithm>

#include "kernels/attention/scratch.h"

namespace encast {

int64_t attention_scratch_bytes(int64_t max_len, int64_t head_dim, bool tables) {
  const int64_t wide =
      scratch_parts(max_len, head_dim).floats() + (tables ? distance_parts(max_len, head_dim).floats() : 0);
  return std::max(wide * static_cast<int64_t>(sizeof(float)),
                  narrow_parts(max_len, head_dim, 2, true).bytes());
}

}  // namespace encast
