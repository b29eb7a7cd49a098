#pragma once
#include "kernels/gemm/epilogue.h"
#include "kernels/sparse/features.h"
#include "kernels/sparse/sparse.h"

// A tile of rows is turned once, and then all panels pass by:
//
//   for tiles of rows
//     rows to columns                              [k][width], in L1 or L2
//     for panels
//       for the panel's 16 blocks of 4 outputs     sums in registers, then in L1: [width][64 outputs]
//       the epilogue of gemm
//
// What differs is a Blocks:
//   kRows                                of a tile, at most kTileRows
//   width(rows)                          that the tile gets: at least rows, a multiple of 16
//   sums(features, width, w, block, to)  the sums of a block's four outputs: those of row r from
//                                        to + r * kPanel on, for `width` rows
namespace encast {
namespace {

// For the epilogue: sums are integers.
struct SparseDot {
  static constexpr bool kQuantized = true;
  ENCAST_SIMD I32x16 zero() { return set1(0); }
};

inline uint8_t* scratch_features(std::byte* scratch) {
  return reinterpret_cast<uint8_t*>(scratch + kScratchSums);
}

// The columns of rows [row, row + rows), which are `offset` rows after the call's first; `own`: where they go
// unless the caller keeps them.
inline const uint8_t* tile_features(const SparseArgs& args, int64_t row, int64_t offset, int64_t rows,
                                    int64_t width, uint8_t* own) {
  const GemmArgs& product = args.product;
  uint8_t* const features = args.features == nullptr ? own : args.features + offset * product.k;
  if (!args.turned) {
    const auto* const a = static_cast<const uint8_t*>(product.a) + row * product.a_stride;
    to_features(a, product.a_stride, rows, product.k, width, features);
  }
  return features;
}

template <class Blocks>
void compute_sparse(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                    int64_t panel_end) {
  const GemmArgs& product = args.product;
  auto* const sums = reinterpret_cast<int32_t*>(args.scratch);
  uint8_t* const own = scratch_features(args.scratch);
  for (int64_t row = m_begin; row < m_end; row += Blocks::kRows) {
    const int64_t rows = m_end - row < Blocks::kRows ? m_end - row : Blocks::kRows,
                  width = Blocks::width(rows);
    const uint8_t* const features = tile_features(args, row, row - m_begin, rows, width, own);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t block = 0; block < kBlocksOfPanel; ++block) {
        Blocks::sums(features, width, args.w, panel * kBlocksOfPanel + block, sums + block * kBlockOutputs);
      }
      const int64_t column = panel * kPanel, columns = product.n - column;
      finish_tile<SparseDot>(product, reinterpret_cast<const float*>(sums), row, rows, column,
                             columns < kPanel ? columns : kPanel);
    }
  }
}

}  // namespace
}  // namespace encast
