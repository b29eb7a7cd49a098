#pragma once
#include "simd/vec.h"

// The register tile, written once for every operand type and ISA level.
//
// All packed layouts look alike in bytes. A *group* is as many k as fill 4 bytes of a row of `a` (1 f32, 2
// bf16, 4 q8), and a panel holds 64 columns of 4 bytes for each group:
//
//   panel   group 0: | column 0 | column 1 | ... | column 63 |   256 bytes
//           group 1: | column 0 | ...                            in each column: the group's k, ascending
//
// What differs is a Dot: how one row's group times sixteen columns' group is added to sixteen sums. A Dot has
//   Shape                        of its tiles, below
//   kGroup                       k of a group
//   kPhases                      1, or 2 where even and odd k of a group need operands of their own
//   kQuantized                   sums are integers that the epilogue has to scale
//   Sum                          sixteen sums: F32x16 or I32x16
//   row<P>(p), columns<P>(p)     operands of phase P, made from the group at p
//   kWideRows                    whether row<P> reads groups of 8 bytes, 4 for each phase, that
//   widen(p, groups, to)         has made from a row's groups
//   add(sum, row, columns)       the sum with the phase added
// (dots.h and the x86 sources define them).
namespace encast {
namespace {

constexpr int64_t kGroupBytes = 4;    // of a row of `a`, or of a column of a panel
constexpr int64_t kPanelBytes = 256;  // one group of a panel
constexpr int64_t kVectorBytes = 64;  // sixteen columns of it, one cache line
constexpr int kPanelVectors = 4;

// Largest number of rows of a tile, and how many vectors of sixteen columns one with so many rows has.
// kEpilogue: whether sums go through the epilogue without being stored first; kActivates: also where it has
// an activation in its coarse form, whose coefficients want three registers.
//
// 24 sums, 4 vectors of weights, 1 broadcast: 29 of 32 zmm registers.
struct Shape6x64 {
  static constexpr bool kEpilogue = true, kActivates = true;
  static constexpr int kRows = 6;
  static constexpr int vectors(int) { return 4; }
};
// 12 sums, 2 of weights, 1 broadcast: 15 of 16 ymm registers. Short tiles are wider, because six sums or
// fewer cannot hide the latency of their additions.
struct Shape6x16 {
  static constexpr bool kEpilogue = true, kActivates = false;
  static constexpr int kRows = 6;
  static constexpr int vectors(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
};
// 12 sums, 2 of weights, 1 broadcast, 1 product or mask: 16. Needs rows that are widened already: widening
// them in the loop takes another register, and one sum is then stored and loaded again with every group.
struct Shape6x16Wide {
  static constexpr bool kEpilogue = true, kActivates = false;
  static constexpr int kRows = 6;
  static constexpr int vectors(int rows) { return rows <= 2 ? 2 : 1; }
};
// Without vector registers: the sums are in memory anyway.
struct Shape4x16 {
  static constexpr bool kEpilogue = false, kActivates = false;
  static constexpr int kRows = 4;
  static constexpr int vectors(int) { return 1; }
};

// Sums must live in registers, so every loop over them is unrolled.
#define ENCAST_UNROLL _Pragma("GCC unroll 16")

// sums[i][v] += row i of `a` times columns 16v to 16v+15 of `w`, over `groups` groups in order. Each group
// prefetches `kLines` cache lines from `ahead` on, which moves on by `ahead_step` bytes.
template <class Dot, int R, int V, int kLines>
ENCAST_SIMD void accumulate(typename Dot::Sum (&sums)[R][V], const uint8_t* a, int64_t a_stride,
                            const uint8_t* w, int64_t groups, const uint8_t* ahead, int64_t ahead_step) {
  for (int64_t g = 0; g < groups; ++g) {
    ENCAST_UNROLL for (int line = 0; line < kLines; ++line) {
      __builtin_prefetch(ahead + line * kVectorBytes, 0, 2);
    }
    const auto phase = [&]<int P>() __attribute__((always_inline)) {
      decltype(Dot::template columns<P>(w)) columns[V];
      ENCAST_UNROLL for (int v = 0; v < V; ++v) columns[v] = Dot::template columns<P>(w + v * kVectorBytes);
      ENCAST_UNROLL for (int i = 0; i < R; ++i) {
        const auto row = Dot::template row<P>(a + i * a_stride);
        ENCAST_UNROLL for (int v = 0; v < V; ++v) sums[i][v] = Dot::add(sums[i][v], row, columns[v]);
        if constexpr (Dot::kPhases == 2) asm volatile("" ::: "memory");
      }
    };
    phase.template operator()<0>();
    if constexpr (Dot::kPhases == 2) {
      // Makes the second phase load its operands again. Kept in registers they would push sums out of them.
      asm volatile("" ::: "memory");
      phase.template operator()<1>();
    }
    a += Dot::kWideRows ? 2 * kGroupBytes : kGroupBytes;
    w += kPanelBytes;
    ahead += ahead_step;
  }
}

ENCAST_SIMD F32x16 load_sums(const float* p, F32x16) { return load(p); }
ENCAST_SIMD I32x16 load_sums(const float* p, I32x16) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
ENCAST_SIMD void store_sums(float* p, F32x16 sums) { store(p, sums); }
ENCAST_SIMD void store_sums(float* p, I32x16 sums) { store_i32(reinterpret_cast<int32_t*>(p), sums); }

}  // namespace
}  // namespace encast
