#pragma once

// What avx2 and avx512 share, over the halves of a vector: the reductions.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

ENCAST_SIMD float reduce_add(F32x16 a) {
  const __m256 sum8 = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 sum4 = _mm_add_ps(_mm256_castps256_ps128(sum8), _mm256_extractf128_ps(sum8, 1));
  const __m128 sum2 = _mm_add_ps(sum4, _mm_movehl_ps(sum4, sum4));
  return _mm_cvtss_f32(_mm_add_ss(sum2, _mm_shuffle_ps(sum2, sum2, 1)));
}

ENCAST_SIMD float reduce_max(F32x16 a) {
  const __m256 max8 = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 max4 = _mm_max_ps(_mm256_castps256_ps128(max8), _mm256_extractf128_ps(max8, 1));
  const __m128 max2 = _mm_max_ps(max4, _mm_movehl_ps(max4, max4));
  return _mm_cvtss_f32(_mm_max_ss(max2, _mm_shuffle_ps(max2, max2, 1)));
}

ENCAST_SIMD int32_t reduce_max(I32x16 a) {
  const __m256i max8 = _mm256_max_epi32(low_half(a), high_half(a));
  const __m128i max4 = _mm_max_epi32(_mm256_castsi256_si128(max8), _mm256_extracti128_si256(max8, 1));
  const __m128i max2 = _mm_max_epi32(max4, _mm_shuffle_epi32(max4, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(max2, _mm_shuffle_epi32(max2, 0xb1)));
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
