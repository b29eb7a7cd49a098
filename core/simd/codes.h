#pragma once
#include "simd/vec.h"

// From sixteen 32-bit lanes to narrow codes: bytes (4 a group) or halves (2 a group). A group fills 32 bits.
//
//   pack_codes<4>(c)        | c0 lanes 0 ... 15 | c1 | c2 | c3 |      a row of bytes, in order
//   interleave_codes<4>(c)  lane i: | c0[i] | c1[i] | c2[i] | c3[i] |
//
// Codes are -128 to 127 (bytes, kSigned), 0 to 255 (bytes), -32768 to 32767 (halves, kSigned) or 0 to 65535
// (halves). What lies outside (NaN became INT32_MIN) is packed as the nearest of them, and interleaved as
// some code.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

template <int kGroup>
ENCAST_SIMD I32x16 interleave_codes(const I32x16 (&c)[kGroup]) {
  if constexpr (kGroup == 4) {
    const I32x16 byte = set1(0xff);
    return ((c[0] & byte) | shift_left<8>(c[1] & byte)) |
           (shift_left<16>(c[2] & byte) | shift_left<24>(c[3]));
  } else {
    return (c[0] & set1(0xffff)) | shift_left<16>(c[1]);
  }
}

#if defined(ENCAST_SIMD_IS_SCALAR)

template <bool kSigned, int kGroup>
ENCAST_SIMD I32x16 pack_codes(const I32x16 (&c)[kGroup]) {
  I32x16 packed;
  for (int i = 0; i < 16; ++i) {
    uint32_t group = 0;
    for (int j = 0; j < kGroup; ++j) {
      const int element = i * kGroup + j;
      constexpr int32_t kHigh = (kSigned ? 1 << (32 / kGroup - 1) : 1 << 32 / kGroup) - 1;
      constexpr int32_t kLow = kSigned ? -1 - kHigh : 0;
      const int32_t value = c[element / 16].lane[element % 16];
      const int32_t code = value < kLow ? kLow : value > kHigh ? kHigh : value;
      group |= (wrap(code) & (kGroup == 4 ? 0xffu : 0xffffu)) << (32 / kGroup * j);
    }
    packed.lane[i] = unwrap(group);
  }
  return packed;
}

#elif defined(ENCAST_SIMD_IS_AVX2)

// Packing works within 128-bit lanes; a permutation puts the pieces in order.
ENCAST_SIMD __m256i pack_halves(I32x16 c, bool is_signed) {
  const __m256i packed = is_signed ? _mm256_packs_epi32(c.lo, c.hi) : _mm256_packus_epi32(c.lo, c.hi);
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
ENCAST_SIMD __m256i pack_bytes(I32x16 a, I32x16 b, bool is_signed) {
  const __m256i first = _mm256_packs_epi32(a.lo, a.hi), second = _mm256_packs_epi32(b.lo, b.hi);
  const __m256i packed = is_signed ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second);
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
template <bool kSigned, int kGroup>
ENCAST_SIMD I32x16 pack_codes(const I32x16 (&c)[kGroup]) {
  if constexpr (kGroup == 4) {
    return {pack_bytes(c[0], c[1], kSigned), pack_bytes(c[2], c[3], kSigned)};
  } else {
    return {pack_halves(c[0], kSigned), pack_halves(c[1], kSigned)};
  }
}

#else

template <bool kSigned, int kGroup>
ENCAST_SIMD I32x16 pack_codes(const I32x16 (&c)[kGroup]) {
  if constexpr (kGroup == 4) {
    const __m512i first = _mm512_packs_epi32(c[0].v, c[1].v), second = _mm512_packs_epi32(c[2].v, c[3].v);
    const __m512i packed = kSigned ? _mm512_packs_epi16(first, second) : _mm512_packus_epi16(first, second);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return {_mm512_permutexvar_epi32(order, packed)};
  } else {
    const __m512i packed = kSigned ? _mm512_packs_epi32(c[0].v, c[1].v) : _mm512_packus_epi32(c[0].v, c[1].v);
    return {_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed)};
  }
}

#endif

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
