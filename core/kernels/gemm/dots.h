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
// half of its four bytes.
template <class TileShape>
struct DotBF16 {
  using Shape = TileShape;
  using Sum = F32x16;
  static constexpr int kGroup = 2, kPhases = 2;
  static constexpr bool kQuantized = false, kWideRows = false;

  ENCAST_SIMD Sum zero() { return set1(0.0f); }
  template <int P>
  ENCAST_SIMD F32x16 row(const uint8_t* p) {
    return widen<P>(set1(load_as<int32_t>(p)));
  }
  template <int P>
  ENCAST_SIMD F32x16 columns(const uint8_t* p) {
    return widen<P>(load_i32(reinterpret_cast<const int32_t*>(p)));
  }
  ENCAST_SIMD Sum add(Sum sum, F32x16 row, F32x16 columns) { return fma(row, columns, sum); }

 private:
  template <int P>
  ENCAST_SIMD F32x16 widen(I32x16 pairs) {
    return from_bits(P == 0 ? shift_left<16>(pairs) : pairs & set1(static_cast<int32_t>(0xffff0000u)));
  }
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
