#pragma once
#include "simd/vec.h"

// transpose(rows): lane j of row i becomes lane i of row j.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

#if defined(ENCAST_SIMD_IS_SCALAR)

ENCAST_SIMD void transpose(F32x16 (&rows)[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = rows[i].lane[j];
      rows[i].lane[j] = rows[j].lane[i];
      rows[j].lane[i] = x;
    }
  }
}

#elif defined(ENCAST_SIMD_IS_AVX2)

// 8x8: pairs within 128-bit lanes, then quadruples, then the lanes themselves.
ENCAST_SIMD void transpose8(__m256 (&r)[8]) {
  __m256 quad[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256 low01 = _mm256_unpacklo_ps(r[i], r[i + 1]), high01 = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const __m256 low23 = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
    const __m256 high23 = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    quad[i] = _mm256_shuffle_ps(low01, low23, 0x44);
    quad[i + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
    quad[i + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
    quad[i + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
  }
}

ENCAST_SIMD void transpose(F32x16 (&rows)[16]) {
  __m256 a[8], b[8], c[8], d[8];  // | a b |
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {   // | c d |
    a[i] = rows[i].lo;
    b[i] = rows[i].hi;
    c[i] = rows[i + 8].lo;
    d[i] = rows[i + 8].hi;
  }
  transpose8(a);
  transpose8(b);
  transpose8(c);
  transpose8(d);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    rows[i] = {a[i], c[i]};
    rows[i + 8] = {b[i], d[i]};
  }
}

#else

// Pairs and quadruples within 128-bit lanes, then two rounds that move the lanes.
ENCAST_SIMD void transpose(F32x16 (&rows)[16]) {
  __m512 quad[16];  // quad[4q + j], 128-bit lane l: column 4l + j of rows 4q to 4q + 3
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512 low01 = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    const __m512 high01 = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    const __m512 low23 = _mm512_unpacklo_ps(rows[i + 2].v, rows[i + 3].v);
    const __m512 high23 = _mm512_unpackhi_ps(rows[i + 2].v, rows[i + 3].v);
    quad[i] = _mm512_shuffle_ps(low01, low23, 0x44);
    quad[i + 1] = _mm512_shuffle_ps(low01, low23, 0xee);
    quad[i + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
    quad[i + 3] = _mm512_shuffle_ps(high01, high23, 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 low_ab = _mm512_shuffle_f32x4(quad[j], quad[4 + j], 0x44);
    const __m512 high_ab = _mm512_shuffle_f32x4(quad[j], quad[4 + j], 0xee);
    const __m512 low_cd = _mm512_shuffle_f32x4(quad[8 + j], quad[12 + j], 0x44);
    const __m512 high_cd = _mm512_shuffle_f32x4(quad[8 + j], quad[12 + j], 0xee);
    rows[j] = {_mm512_shuffle_f32x4(low_ab, low_cd, 0x88)};
    rows[4 + j] = {_mm512_shuffle_f32x4(low_ab, low_cd, 0xdd)};
    rows[8 + j] = {_mm512_shuffle_f32x4(high_ab, high_cd, 0x88)};
    rows[12 + j] = {_mm512_shuffle_f32x4(high_ab, high_cd, 0xdd)};
  }
}

#endif

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
