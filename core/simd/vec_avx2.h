#pragma once
#include <immintrin.h>

// F32x16 as two ymm registers. Included by vec.h, which holds the contract.
#define ENCAST_SIMD_LEVEL avx2
#define ENCAST_SIMD_IS_AVX2

namespace encast {
inline namespace avx2 {

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};
// All bits of a lane are set or clear.
struct Mask16 {
  __m256i lo, hi;
};

ENCAST_SIMD Mask16 first_lanes(int64_t n) {
  const __m256i count = _mm256_set1_epi32(static_cast<int32_t>(n));
  return {_mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(count, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

ENCAST_SIMD F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ENCAST_SIMD I32x16 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

ENCAST_SIMD F32x16 select(Mask16 m, F32x16 a, F32x16 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(m.lo)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(m.hi))};
}
ENCAST_SIMD I32x16 select(Mask16 m, I32x16 a, I32x16 b) {
  return {_mm256_blendv_epi8(b.lo, a.lo, m.lo), _mm256_blendv_epi8(b.hi, a.hi, m.hi)};
}

ENCAST_SIMD F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ENCAST_SIMD F32x16 load_partial(const float* p, int64_t n, float fill = 0) {
  const Mask16 m = first_lanes(n);
  return select(m, F32x16{_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)}, set1(fill));
}
ENCAST_SIMD void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
ENCAST_SIMD void store_partial(float* p, int64_t n, F32x16 a) {
  const Mask16 m = first_lanes(n);
  _mm256_maskstore_ps(p, m.lo, a.lo);
  _mm256_maskstore_ps(p + 8, m.hi, a.hi);
}
ENCAST_SIMD I32x16 load_i32(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
ENCAST_SIMD void store_i32(int32_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
ENCAST_SIMD I32x16 load_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
ENCAST_SIMD void store_u8(uint8_t* p, I32x16 a) {
  const __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(a.lo), _mm256_extracti128_si256(a.lo, 1));
  const __m128i high = _mm_packs_epi32(_mm256_castsi256_si128(a.hi), _mm256_extracti128_si256(a.hi, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(low, high));
}
ENCAST_SIMD I32x16 load_u16(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Lanes are 0 to 65535.
ENCAST_SIMD void store_u16(uint16_t* p, I32x16 a) {
  const __m256i halves = _mm256_packus_epi32(a.lo, a.hi);  // packs within 128-bit lanes
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(halves, 0xd8));
}

ENCAST_SIMD F32x16 operator+(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
ENCAST_SIMD F32x16 operator-(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
ENCAST_SIMD F32x16 operator*(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
ENCAST_SIMD F32x16 operator/(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
ENCAST_SIMD F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
ENCAST_SIMD F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
ENCAST_SIMD F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
ENCAST_SIMD F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
ENCAST_SIMD F32x16 abs(F32x16 a) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, magnitude), _mm256_and_ps(a.hi, magnitude)};
}
ENCAST_SIMD F32x16 sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
ENCAST_SIMD F32x16 round(F32x16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
ENCAST_SIMD I32x16 to_i32(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
ENCAST_SIMD F32x16 to_f32(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
ENCAST_SIMD I32x16 bits(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
ENCAST_SIMD F32x16 from_bits(I32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }

ENCAST_SIMD I32x16 operator+(I32x16 a, I32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 operator-(I32x16 a, I32x16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 operator*(I32x16 a, I32x16 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 operator&(I32x16 a, I32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 operator|(I32x16 a, I32x16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 operator^(I32x16 a, I32x16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 max(I32x16 a, I32x16 b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
ENCAST_SIMD I32x16 min(I32x16 a, I32x16 b) {
  return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)};
}
template <int s>
ENCAST_SIMD I32x16 shift_left(I32x16 a) {
  return {_mm256_slli_epi32(a.lo, s), _mm256_slli_epi32(a.hi, s)};
}
template <int s>
ENCAST_SIMD I32x16 shift_right(I32x16 a) {
  return {_mm256_srli_epi32(a.lo, s), _mm256_srli_epi32(a.hi, s)};
}

ENCAST_SIMD Mask16 less(F32x16 a, F32x16 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
ENCAST_SIMD Mask16 less_equal(F32x16 a, F32x16 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ))};
}
ENCAST_SIMD Mask16 is_nan(F32x16 a) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}

// Two factors, because 2^n alone may lie outside of f32: the first product is exact, the second rounds.
ENCAST_SIMD F32x16 times_power_of_2(F32x16 a, F32x16 n) {
  const I32x16 whole = to_i32(n);
  const I32x16 half = {_mm256_srai_epi32(whole.lo, 1), _mm256_srai_epi32(whole.hi, 1)};
  const I32x16 bias = set1(127);
  return a * from_bits(shift_left<23>(half + bias)) * from_bits(shift_left<23>(whole - half + bias));
}

// vpermps looks at three bits of an index; the fourth chooses between the halves of the table.
ENCAST_SIMD F32x16 lookup(const float* table, I32x16 i) {
  const __m256 lower = _mm256_load_ps(table), upper = _mm256_load_ps(table + 8);
  const auto half = [&](__m256i index) __attribute__((always_inline)) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, index), _mm256_permutevar8x32_ps(upper, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  };
  return {half(i.lo), half(i.hi)};
}

ENCAST_SIMD __m256 low_half(F32x16 a) { return a.lo; }
ENCAST_SIMD __m256 high_half(F32x16 a) { return a.hi; }
ENCAST_SIMD __m256i low_half(I32x16 a) { return a.lo; }
ENCAST_SIMD __m256i high_half(I32x16 a) { return a.hi; }

}  // namespace avx2
}  // namespace encast

#include "simd/vec_x86.h"
