#pragma once
#include "kernels/gemm/tile.h"

// The Dots that every ISA level shares, over the sixteen virtual lanes. See tile.h for what a Dot is.
namespace encast {
namespace {

template <class T>
ENCAST_SIMD T load_as(const void* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

// Arithmetic f32.
template <class TileShape>
struct DotF32 {
  using Shape = TileShape;
  using Sum = F32x16;
  static constexpr int kGroup = 1, kPhases = 1;
  static constexpr bool kQuantized = false, kWideRows = false;

  ENCAST_SIMD Sum zero() { return set1(0.0f); }
  template <int P>
  ENCAST_SIMD F32x16 row(const uint8_t* p) {
    return set1(load_as<float>(p));
  }
  template <int P>
  ENCAST_SIMD F32x16 columns(const uint8_t* p) {
    return load(reinterpret_cast<const float*>(p));
  }
  ENCAST_SIMD Sum add(Sum sum, F32x16 row, F32x16 columns) { return fma(row, columns, sum); }
};

// Arithmetic bf16_fma: both operands widened, which is exact, then as f32. The even k of a pair is the lower
// half of its four bytes. Rows are widened once a tile, because widening shares ports with the products.
template <class TileShape>
struct DotBF16 {
  using Shape = TileShape;
  using Sum = F32x16;
  static constexpr int kGroup = 2, kPhases = 2;
  static constexpr bool kQuantized = false, kWideRows = true;

  ENCAST_SIMD Sum zero() { return set1(0.0f); }
  ENCAST_SIMD void widen(const uint8_t* p, int64_t groups, uint8_t* to) {
    const auto* from = reinterpret_cast<const uint16_t*>(p);
    auto* wide = reinterpret_cast<float*>(to);
    int64_t i = 0;
    for (; i + 16 <= 2 * groups; i += 16) store(wide + i, load_bf16(from + i));
    for (; i < 2 * groups; ++i) {
      const uint32_t bits = uint32_t{load_as<uint16_t>(from + i)} << 16;
      __builtin_memcpy(wide + i, &bits, sizeof bits);
    }
  }
  template <int P>
  ENCAST_SIMD F32x16 row(const uint8_t* p) {
    return set1(load_as<float>(p + 4 * P));
  }
  template <int P>
  ENCAST_SIMD F32x16 columns(const uint8_t* p) {
    const I32x16 pairs = load_i32(reinterpret_cast<const int32_t*>(p));
    return from_bits(P == 0 ? shift_left<16>(pairs) : pairs & set1(static_cast<int32_t>(0xffff0000u)));
  }
  ENCAST_SIMD Sum add(Sum sum, F32x16 row, F32x16 columns) { return fma(row, columns, sum); }
};

// What the Dots of arithmetic s8 have in common.
template <class TileShape>
struct DotQ8Base {
  using Shape = TileShape;
  using Sum = I32x16;
  static constexpr int kGroup = 4;
  static constexpr bool kQuantized = true, kWideRows = false;

  ENCAST_SIMD Sum zero() { return set1(0); }
};

}  // namespace
}  // namespace encast
