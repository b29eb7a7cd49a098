#pragma once
#include <cstddef>

#include "kernels/gemm/gemm.h"

// Contract of the family: the product of gemm_q8s8 whose weight has blocks of four outputs x one input that
// are zero as a whole, and are left out. The sums are the same exact integers and go through the same
// epilogue, so the bits are those of gemm_q8s8 on the same weight.
//
// op sparse_q8s8:         a q8[m, k], w SparseWeight, arithmetic s8
// op sparse_q8s8_columns: the same for one tile of rows, whose outputs stay columns
// op narrow_columns:      those to q8 columns, arithmetic f32
//
// The last two are for products of which others alone read the narrowed outputs: rows are turned to columns
// once for several products, and the sums of the first are never turned back.
namespace encast {

constexpr int64_t kBlockOutputs = 4;                        // of a block
constexpr int64_t kGroupInputs = 4;                         // of a block that stand together
constexpr int64_t kBlocksOfPanel = kPanel / kBlockOutputs;  // a panel is 64 outputs, as in gemm
constexpr int64_t kMostSparseInputs = int64_t{1} << 16;     // columns are 16 bits

// Where it comes from a file, check.h says whether it is one.
//
// Block b has outputs 4b to 4b + 3, and groups [starts[b], starts[b + 1]). The columns of a block are its
// inputs with a weight that is not zero for one of the outputs, rising, four a group; where the last group
// has fewer, the last column is repeated with weights of zero. There are blocks for whole panels: those of
// outputs that do not exist have no groups.
struct SparseWeight {
  const int8_t* values = nullptr;     // [groups][4 outputs][4 inputs]
  const uint16_t* columns = nullptr;  // [groups][4]
  const int32_t* starts = nullptr;    // [blocks + 1]
};

constexpr int64_t sparse_blocks(int64_t n) { return round_up(n, kPanel) / kBlockOutputs; }

// Most rows that a kernel takes at a time. It turns them to columns: column c lies at c * width, for a width
// that is the number of rows rounded up to 8 or a multiple of 16 that the kernel has a form for.
constexpr int64_t kTileRows = 64;

// Outputs of a tile of up to kTileRows rows by columns, for narrow_columns: an output's kTileRows values
// stand side by side, and at position 16q + 4l + i (q, l, i below 4) is that of row 16l + 4q + i, where sums
// lie.
struct ColumnsOut {
  float* values = nullptr;  // [n][kTileRows]
  // [kTileRows], in the order of values: a row's largest value, at least 0, and its smallest, at most -0. A
  // NaN is beyond all others of its sign.
  float *above = nullptr, *below = nullptr;
};

struct SparseArgs {
  GemmArgs product;  // of gemm_q8s8, without w and next_w
  SparseWeight w;
  std::byte* scratch = nullptr;  // of the calling thread: sparse_scratch_bytes(k), 64-byte aligned
  // Null, or where the columns of rows from m_begin on are kept, whole tiles of kTileRows * k bytes, for
  // calls that multiply the same rows by other panels: those are made with `turned`, and read a no more.
  uint8_t* features = nullptr;
  bool turned = false;
  // Of sparse_q8s8_columns, in place of c. Its m_begin and m_end are one tile, its panels all, n a multiple
  // of kBlockOutputs; the activation is none or in its coarse form, and nothing is added.
  ColumnsOut columns = {};
};

constexpr int64_t features_bytes(int64_t rows, int64_t k) { return round_up(rows, kTileRows) * k; }

// Sums of a tile and a panel, then the columns of the tile.
constexpr int64_t kScratchSums = kTileRows * kPanel * static_cast<int64_t>(sizeof(int32_t));
constexpr int64_t sparse_scratch_bytes(int64_t k) { return kScratchSums + features_bytes(kTileRows, k); }

// As GemmFn.
using SparseFn = void (*)(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                          int64_t panel_end);

// What narrow_rows makes of the rows of a tile (kernels/quantize), from columns to columns.
struct NarrowColumnsArgs {
  int64_t rows = 0, cols = 0;  // rows: up to kTileRows
  ColumnsOut from;
  bool symmetric = false;
  uint8_t* codes = nullptr;  // [cols][kTileRows], rows in their order: SparseArgs::features
  float* scale = nullptr;    // [rows]
  int32_t* zero = nullptr;   // [rows]
};

using NarrowColumnsFn = void (*)(const NarrowColumnsArgs& args);

}  // namespace encast
