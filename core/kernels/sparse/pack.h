#pragma once
#include <cstdint>
#include <vector>

#include "kernels/sparse/sparse.h"

// For tests and benchmarks: a weight in the form of the family, as src/encast/ir/blocks.py packs it.
namespace encast::testing {

struct PackedSparse {
  std::vector<int8_t> values;
  std::vector<uint16_t> columns;
  std::vector<int32_t> starts;

  SparseWeight weight() const { return {values.data(), columns.data(), starts.data()}; }
  int64_t groups() const { return static_cast<int64_t>(columns.size()) / kGroupInputs; }
};

// w: s8[n, k].
PackedSparse pack_sparse(const int8_t* w, int64_t n, int64_t k);

}  // namespace encast::testing
