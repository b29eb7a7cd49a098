#pragma once
#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

// Tiles of AMX, written over a thin interface of tile instructions, so that the same source runs on the
// processor (x86_amx.cc) and on a stand-in in plain C++ (amx_stand_in.h, for the tests).
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to 16 x 16 sums the products of 16 rows of
// `a`, 16 groups each, and 16 groups of a panel, 16 columns each: a panel is in the order that it wants, with
// kPanelBytes from group to group. Of the eight registers
//
//              B6: columns 0-15   B7: columns 16-31
//   A4: rows 0-15    C0                C1              32 x 32 outputs: four loads for four products
//   A5: rows 16-31   C2                C3
//
// The last groups, fewer than 16, are copied into zeroed blocks. Rows that do not exist are left out by the
// tile configuration, which therefore changes with the number of rows.
namespace encast {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileGroups = 16;  // 64 bytes of a row of `a`
constexpr int64_t kTileColumns = 16;
constexpr int64_t kTileBytes = 64;  // of a row of a tile

// What ldtilecfg reads (Intel SDM, volume 1, chapter 18).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Rows of C0, C1, A4 and of C2, C3, A5. Without lower rows their registers stay unconfigured and unused.
ENCAST_SIMD TileConfig tile_config(int64_t upper, int64_t lower) {
  TileConfig config;
  const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileGroups, kTileGroups};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    config.row_bytes[tile] = rows[tile] > 0 ? kTileBytes : 0;
  }
  return config;
}

// What the driver wants to know of the sums.
struct AmxQ8 : DotQ8Base<Shape6x64> {};
struct AmxBF16 {
  using Sum = F32x16;
  static constexpr int kGroup = 2;
  static constexpr bool kQuantized = false;
  ENCAST_SIMD Sum zero() { return set1(0.0f); }
};

// Instructions: configure(TileConfig), release(), and zero<t>(), load<t>(p, stride), store<t>(p, stride),
// multiply<Dot, c, a, b>().
template <class DotType, class Instructions>
class AmxTiles {
 public:
  using Dot = DotType;
  static constexpr int kRows = 2 * kTileRows;
  static constexpr bool kHasEpilogue = false;
  static constexpr bool kActivates = false;

  void run(const GemmArgs&, const TileJob& job, int64_t rows) {
    if (rows != configured_rows_) {
      const int64_t upper = rows < kTileRows ? rows : kTileRows;
      tiles_.configure(tile_config(upper, rows - upper));
      configured_rows_ = rows;
    }
    if (rows > kTileRows) {
      columns<true>(job, rows);
    } else {
      columns<false>(job, rows);
    }
  }

  // Tile registers left in use would make the kernel save 8 KB at every context switch.
  void finish() {
    if (configured_rows_ > 0) tiles_.release();
  }

  // A tile instruction takes as long for one row as for sixteen.
  static int64_t tile_rows(int64_t rows_left) { return rows_left < kRows ? rows_left : kRows; }

  // Two halves of a panel read all of it, so the next one is left to the hardware's prefetchers.
  static int64_t ahead_step(int64_t, int64_t) { return 0; }

 private:
  template <bool lower>
  void columns(const TileJob& job, int64_t rows) {
    for (int64_t first = 0; first < kPanel; first += 2 * kTileColumns) {
      const int64_t sum_stride = job.sums_stride * int64_t{sizeof(float)};
      if (job.resume == nullptr) {
        zero<lower>();
      } else {
        load_sums_of<lower>(job.resume + first, job.resume_stride);
      }
      const uint8_t* w = job.w + first / kTileColumns * kVectorBytes;
      int64_t g = 0;
      for (; g + kTileGroups <= job.groups; g += kTileGroups) {
        multiply<lower>(job.a + g * kGroupBytes, job.a_stride, w + g * kPanelBytes, kPanelBytes);
      }
      if (g < job.groups) tail<lower>(job, w, g, rows);
      float* sums = job.sums + first;
      tiles_.template store<0>(sums, sum_stride);
      tiles_.template store<1>(sums + kTileColumns, sum_stride);
      if constexpr (lower) {
        tiles_.template store<2>(sums + kTileRows * job.sums_stride, sum_stride);
        tiles_.template store<3>(sums + kTileRows * job.sums_stride + kTileColumns, sum_stride);
      }
    }
  }

  template <bool lower>
  void zero() {
    tiles_.template zero<0>();
    tiles_.template zero<1>();
    if constexpr (lower) {
      tiles_.template zero<2>();
      tiles_.template zero<3>();
    }
  }

  template <bool lower>
  void load_sums_of(const float* sums, int64_t stride) {
    const int64_t bytes = stride * int64_t{sizeof(float)};
    tiles_.template load<0>(sums, bytes);
    tiles_.template load<1>(sums + kTileColumns, bytes);
    if constexpr (lower) {
      tiles_.template load<2>(sums + kTileRows * stride, bytes);
      tiles_.template load<3>(sums + kTileRows * stride + kTileColumns, bytes);
    }
  }

  template <bool lower>
  [[gnu::always_inline]] void multiply(const uint8_t* a, int64_t a_stride, const uint8_t* w,
                                       int64_t w_stride) {
    tiles_.template load<6>(w, w_stride);
    tiles_.template load<7>(w + kVectorBytes, w_stride);
    tiles_.template load<4>(a, a_stride);
    tiles_.template multiply<Dot, 0, 4, 6>();
    tiles_.template multiply<Dot, 1, 4, 7>();
    if constexpr (lower) {
      tiles_.template load<5>(a + kTileRows * a_stride, a_stride);
      tiles_.template multiply<Dot, 2, 5, 6>();
      tiles_.template multiply<Dot, 3, 5, 7>();
    }
  }

  template <bool lower>
  [[gnu::noinline]] void tail(const TileJob& job, const uint8_t* w, int64_t g, int64_t rows) {
    alignas(64) uint8_t a[kRows][kTileBytes] = {};
    alignas(64) uint8_t columns[kTileGroups][2 * kVectorBytes] = {};
    const int64_t groups = job.groups - g;
    for (int64_t i = 0; i < rows; ++i) {
      __builtin_memcpy(a[i], job.a + i * job.a_stride + g * kGroupBytes,
                       static_cast<size_t>(groups * kGroupBytes));
    }
    for (int64_t i = 0; i < groups; ++i) {
      __builtin_memcpy(columns[i], w + (g + i) * kPanelBytes, 2 * kVectorBytes);
    }
    multiply<lower>(a[0], kTileBytes, columns[0], 2 * kVectorBytes);
  }

  Instructions tiles_;
  int64_t configured_rows_ = 0;
};

}  // namespace
}  // namespace encast
