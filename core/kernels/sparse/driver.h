#pragma once
#include "kernels/gemm/epilogue.h"
#include "kernels/sparse/features.h"
#include "kernels/sparse/sparse.h"
#include "simd/transpose.h"

// A tile of rows is turned once, and then all panels pass by:
//
//   for tiles of rows
//     rows to columns                              [k][width], in L1 or L2
//     for panels
//       for the panel's 16 blocks of 4 outputs     sums in registers, then in L1: [64 outputs][width]
//       columns back to rows                       [width][64 outputs]
//       the epilogue of gemm
//
// What differs is a Blocks:
//   kRows                                of a tile, at most kTileRows
//   width(rows)                          that the tile gets: at least rows, a multiple of 16
//   row_of(width, vector, lane)          of the sums that `sums` stores: which row lane `lane` of vector
//                                        `vector` belongs to
//   sums(features, width, w, block, to)  the sums of a block's four outputs to `to`, `width` for each output
namespace encast {
namespace {

// For the epilogue: sums are integers.
struct SparseDot {
  static constexpr bool kQuantized = true;
  ENCAST_SIMD I32x16 zero() { return set1(0); }
};

// sums [64 outputs][width] to staged [width][64 outputs].
template <class Blocks>
ENCAST_SIMD void turn_back(const int32_t* sums, int64_t width, int32_t* staged) {
  for (int64_t output = 0; output < kPanel; output += 16) {
    for (int64_t vector = 0; vector < width / 16; ++vector) {
      F32x16 tile[16];
      ENCAST_UNROLL for (int i = 0; i < 16; ++i) tile[i] =
          from_bits(load_i32(sums + (output + i) * width + 16 * vector));
      transpose(tile);
      ENCAST_UNROLL for (int i = 0; i < 16; ++i) {
        store_i32(staged + Blocks::row_of(width, vector, i) * kPanel + output, bits(tile[i]));
      }
    }
  }
}

template <class Blocks>
void compute_sparse(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                    int64_t panel_end) {
  const GemmArgs& product = args.product;
  auto* const sums = reinterpret_cast<int32_t*>(args.scratch);
  int32_t* const staged = sums + kTileRows * kPanel;
  auto* const features = reinterpret_cast<uint8_t*>(staged + kTileRows * kPanel);
  for (int64_t row = m_begin; row < m_end; row += Blocks::kRows) {
    const int64_t rows = m_end - row < Blocks::kRows ? m_end - row : Blocks::kRows,
                  width = Blocks::width(rows);
    const auto* const a = static_cast<const uint8_t*>(product.a) + row * product.a_stride;
    to_features(a, product.a_stride, rows, product.k, width, features);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t block = 0; block < kBlocksOfPanel; ++block) {
        Blocks::sums(features, width, args.w, panel * kBlocksOfPanel + block,
                     sums + block * kBlockOutputs * width);
      }
      turn_back<Blocks>(sums, width, staged);
      const int64_t column = panel * kPanel, columns = product.n - column;
      finish_tile<SparseDot>(product, reinterpret_cast<const float*>(staged), row, rows, column,
                             columns < kPanel ? columns : kPanel);
    }
  }
}

}  // namespace
}  // namespace encast
