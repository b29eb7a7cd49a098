#pragma once
#include <immintrin.h>

#include "kernels/gemm/tile.h"
#include "kernels/sparse/sparse.h"
#include "simd/vec.h"

// Rows of bytes to columns: what a sparse product reads of a token is scattered, of a column it is not. And
// the sums that come of columns back to rows.
namespace encast {
namespace {

// The same for one and for four blocks of 16 bytes of a row at a time.
ENCAST_SIMD void load_bytes(const uint8_t* from, __m128i& bytes) {
  bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
ENCAST_SIMD __m128i unpack_low(__m128i a, __m128i b) { return _mm_unpacklo_epi8(a, b); }
ENCAST_SIMD __m128i unpack_high(__m128i a, __m128i b) { return _mm_unpackhi_epi8(a, b); }
ENCAST_SIMD void store_bytes(__m128i bytes, uint8_t* to, int64_t) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
#if defined(__AVX512BW__)
ENCAST_SIMD void load_bytes(const uint8_t* from, __m512i& bytes) { bytes = _mm512_loadu_si512(from); }
ENCAST_SIMD __m512i unpack_low(__m512i a, __m512i b) { return _mm512_unpacklo_epi8(a, b); }
ENCAST_SIMD __m512i unpack_high(__m512i a, __m512i b) { return _mm512_unpackhi_epi8(a, b); }
ENCAST_SIMD void store_bytes(__m512i bytes, uint8_t* to, int64_t block_stride) {
  store_bytes(_mm512_castsi512_si128(bytes), to, 0);
  store_bytes(_mm512_extracti32x4_epi32(bytes, 1), to + block_stride, 0);
  store_bytes(_mm512_extracti32x4_epi32(bytes, 2), to + 2 * block_stride, 0);
  store_bytes(_mm512_extracti32x4_epi32(bytes, 3), to + 3 * block_stride, 0);
}
#endif

// Bytes `at` and on of 16 rows to columns, as many as a Vector has: byte j of row i becomes byte i of column
// j.
template <class Vector>
ENCAST_SIMD void transpose_bytes(const uint8_t* const (&rows)[16], int64_t at, uint8_t* to,
                                 int64_t to_stride) {
  Vector a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) load_bytes(rows[i] + at, a[i]);
  // Each round interleaves the first eight with the last eight; the fourth has all bytes in their places.
  const auto interleave = [](const Vector(&from)[16], Vector(&into)[16]) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      into[2 * i] = unpack_low(from[i], from[i + 8]);
      into[2 * i + 1] = unpack_high(from[i], from[i + 8]);
    }
  };
  interleave(a, b);
  interleave(b, a);
  interleave(a, b);
  interleave(b, a);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store_bytes(a[i], to + i * to_stride, 16 * to_stride);
}

// `count` rows of k bytes to k columns of `width` bytes, a multiple of 16; where there are fewer rows, the
// last one stands in for them.
[[gnu::noinline]] void to_features(const uint8_t* a, int64_t stride, int64_t count, int64_t k, int64_t width,
                                   uint8_t* features) {
  for (int64_t first = 0; first < width; first += 16) {
    const uint8_t* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = a + (first + i < count ? first + i : count - 1) * stride;
    int64_t column = 0;
#if defined(__AVX512BW__)
    for (; column + 64 <= k; column += 64) {
      transpose_bytes<__m512i>(rows, column, features + column * width + first, width);
    }
#endif
    for (; column + 16 <= k; column += 16) {
      transpose_bytes<__m128i>(rows, column, features + column * width + first, width);
    }
    for (; column < k; ++column) {
      for (int64_t i = 0; i < 16; ++i) features[column * width + first + i] = rows[i][column];
    }
  }
}

// Column i of a group. volatile: clang would read all four as a vector, and take them out of it on the port
// of the shuffles.
ENCAST_SIMD int64_t column_of(const uint16_t* columns, int i) {
  return *static_cast<const volatile uint16_t*>(columns + i);
}

// The sums of four outputs, four rows a 128-bit lane, to rows of kPanel: those of a lane begin `lane_rows`
// after those of the lane before.
#if defined(__AVX2__)
ENCAST_SIMD void store_rows(const __m256i (&sums)[kBlockOutputs], int32_t* to, int64_t lane_rows) {
  const __m256i low01 = _mm256_unpacklo_epi32(sums[0], sums[1]),
                high01 = _mm256_unpackhi_epi32(sums[0], sums[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(sums[2], sums[3]),
                high23 = _mm256_unpackhi_epi32(sums[2], sums[3]);
  const __m256i rows[4] = {_mm256_unpacklo_epi64(low01, low23), _mm256_unpackhi_epi64(low01, low23),
                           _mm256_unpacklo_epi64(high01, high23), _mm256_unpackhi_epi64(high01, high23)};
  ENCAST_UNROLL for (int i = 0; i < 4; ++i) {
    const auto lane = [&](int l) __attribute__((always_inline)) {
      return reinterpret_cast<__m128i*>(to + (l * lane_rows + i) * kPanel);
    };
    _mm_storeu_si128(lane(0), _mm256_castsi256_si128(rows[i]));
    _mm_storeu_si128(lane(1), _mm256_extracti128_si256(rows[i], 1));
  }
}
#endif

#if defined(__AVX512F__)
ENCAST_SIMD void store_rows(const __m512i (&sums)[kBlockOutputs], int32_t* to, int64_t lane_rows) {
  const __m512i low01 = _mm512_unpacklo_epi32(sums[0], sums[1]),
                high01 = _mm512_unpackhi_epi32(sums[0], sums[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(sums[2], sums[3]),
                high23 = _mm512_unpackhi_epi32(sums[2], sums[3]);
  const __m512i rows[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                           _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
  ENCAST_UNROLL for (int i = 0; i < 4; ++i) {
    const auto lane = [&](int l) __attribute__((always_inline)) {
      return reinterpret_cast<__m128i*>(to + (l * lane_rows + i) * kPanel);
    };
    _mm_storeu_si128(lane(0), _mm512_castsi512_si128(rows[i]));
    _mm_storeu_si128(lane(1), _mm512_extracti32x4_epi32(rows[i], 1));
    _mm_storeu_si128(lane(2), _mm512_extracti32x4_epi32(rows[i], 2));
    _mm_storeu_si128(lane(3), _mm512_extracti32x4_epi32(rows[i], 3));
  }
}
#endif

}  // namespace
}  // namespace encast
