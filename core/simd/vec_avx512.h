#pragma once
#include <immintrin.h>

// F32x16 as one zmm register. Included by vec.h, which holds the contract.
#define ENCAST_SIMD_LEVEL avx512
#define ENCAST_SIMD_IS_AVX512

namespace encast {
inline namespace avx512 {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};
struct Mask16 {
  __mmask16 v;
};

ENCAST_SIMD Mask16 first_lanes(int64_t n) { return {static_cast<__mmask16>((1u << n) - 1)}; }

ENCAST_SIMD F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
ENCAST_SIMD I32x16 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }

ENCAST_SIMD F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
ENCAST_SIMD F32x16 load_partial(const float* p, int64_t n, float fill = 0) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(n).v, p)};
}
ENCAST_SIMD void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
ENCAST_SIMD void store_partial(float* p, int64_t n, F32x16 a) {
  _mm512_mask_storeu_ps(p, first_lanes(n).v, a.v);
}
ENCAST_SIMD I32x16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
ENCAST_SIMD void store_i32(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
ENCAST_SIMD I32x16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
ENCAST_SIMD void store_u8(uint8_t* p, I32x16 a) {
  // vpmovusdb takes its source as unsigned: negative lanes are cleared before it.
  const __m512i positive = _mm512_max_epi32(a.v, _mm512_setzero_si512());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(positive));
}
ENCAST_SIMD I32x16 load_u16(const uint16_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Lanes are 0 to 65535.
ENCAST_SIMD void store_u16(uint16_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}

ENCAST_SIMD F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
ENCAST_SIMD F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
ENCAST_SIMD F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
ENCAST_SIMD F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
ENCAST_SIMD F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ENCAST_SIMD F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
ENCAST_SIMD F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
ENCAST_SIMD F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
ENCAST_SIMD F32x16 abs(F32x16 a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}
ENCAST_SIMD F32x16 sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
ENCAST_SIMD F32x16 round(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
ENCAST_SIMD I32x16 to_i32(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
ENCAST_SIMD F32x16 to_f32(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
ENCAST_SIMD I32x16 bits(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
ENCAST_SIMD F32x16 from_bits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
ENCAST_SIMD F32x16 times_power_of_2(F32x16 a, F32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

ENCAST_SIMD I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
ENCAST_SIMD I32x16 operator-(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
ENCAST_SIMD I32x16 operator*(I32x16 a, I32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
ENCAST_SIMD I32x16 operator&(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
ENCAST_SIMD I32x16 operator|(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
ENCAST_SIMD I32x16 operator^(I32x16 a, I32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
ENCAST_SIMD I32x16 max(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
ENCAST_SIMD I32x16 min(I32x16 a, I32x16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
template <int s>
ENCAST_SIMD I32x16 shift_left(I32x16 a) {
  return {_mm512_slli_epi32(a.v, s)};
}
template <int s>
ENCAST_SIMD I32x16 shift_right(I32x16 a) {
  return {_mm512_srli_epi32(a.v, s)};
}

ENCAST_SIMD Mask16 less(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
ENCAST_SIMD Mask16 less_equal(F32x16 a, F32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
ENCAST_SIMD Mask16 is_nan(F32x16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
ENCAST_SIMD F32x16 select(Mask16 m, F32x16 a, F32x16 b) { return {_mm512_mask_mov_ps(b.v, m.v, a.v)}; }
ENCAST_SIMD I32x16 select(Mask16 m, I32x16 a, I32x16 b) { return {_mm512_mask_mov_epi32(b.v, m.v, a.v)}; }

ENCAST_SIMD F32x16 lookup(const float* table, I32x16 i) {
  return {_mm512_permutexvar_ps(i.v, _mm512_load_ps(table))};
}

ENCAST_SIMD __m256 low_half(F32x16 a) { return _mm512_castps512_ps256(a.v); }
ENCAST_SIMD __m256 high_half(F32x16 a) { return _mm512_extractf32x8_ps(a.v, 1); }
ENCAST_SIMD __m256i low_half(I32x16 a) { return _mm512_castsi512_si256(a.v); }
ENCAST_SIMD __m256i high_half(I32x16 a) { return _mm512_extracti64x4_epi64(a.v, 1); }

}  // namespace avx512
}  // namespace encast

#include "simd/vec_x86.h"
