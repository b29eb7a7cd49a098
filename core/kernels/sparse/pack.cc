#include "kernels/sparse/pack.h"

#include <algorithm>

namespace encast::testing {

PackedSparse pack_sparse(const int8_t* w, int64_t n, int64_t k) {
  PackedSparse packed;
  packed.starts.push_back(0);
  for (int64_t block = 0; block < sparse_blocks(n); ++block) {
    const int64_t begin = std::min(n, block * kBlockOutputs), end = std::min(n, begin + kBlockOutputs);
    std::vector<int64_t> columns;
    for (int64_t column = 0; column < k; ++column) {
      const auto wanted = [&](int64_t output) { return w[output * k + column] != 0; };
      bool any = false;
      for (int64_t output = begin; output < end; ++output) any = any || wanted(output);
      if (any) columns.push_back(column);
    }
    const auto count = static_cast<int64_t>(columns.size()),
               groups = (count + kGroupInputs - 1) / kGroupInputs;
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t output = begin; output < begin + kBlockOutputs; ++output) {
        for (int64_t at = group * kGroupInputs; at < (group + 1) * kGroupInputs; ++at) {
          const bool exists = at < count && output < end;
          packed.values.push_back(exists ? w[output * k + columns[static_cast<size_t>(at)]] : int8_t{0});
        }
      }
      for (int64_t at = group * kGroupInputs; at < (group + 1) * kGroupInputs; ++at) {
        packed.columns.push_back(
            static_cast<uint16_t>(columns[static_cast<size_t>(std::min(at, count - 1))]));
      }
    }
    packed.starts.push_back(static_cast<int32_t>(packed.starts.back() + groups));
  }
  if (packed.values.empty()) {  // as in a file, where nothing is stored that is empty
    packed.values.resize(kBlockOutputs * kGroupInputs);
    packed.columns.resize(kGroupInputs);
  }
  return packed;
}

}  // namespace encast::testing
