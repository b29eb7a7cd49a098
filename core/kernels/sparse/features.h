#pragma once
#include <immintrin.h>

#include "kernels/gemm/tile.h"
#include "kernels/sparse/sparse.h"
#include "simd/vec.h"

// Rows of bytes to columns: what a sparse product reads of a token is scattered, of a column it is not. And
// the sums that come of columns back to rows.
namespace encast {
namespace {

ENCAST_SIMD __m128i unpack_low(__m128i a, __m128i b) { return _mm_unpacklo_epi8(a, b); }
ENCAST_SIMD __m128i unpack_high(__m128i a, __m128i b) { return _mm_unpackhi_epi8(a, b); }
#if defined(__AVX512BW__)
ENCAST_SIMD __m512i unpack_low(__m512i a, __m512i b) { return _mm512_unpacklo_epi8(a, b); }
ENCAST_SIMD __m512i unpack_high(__m512i a, __m512i b) { return _mm512_unpackhi_epi8(a, b); }
#endif

// In each 128-bit lane: byte j of register i becomes byte i of register j.
template <class Vector>
ENCAST_SIMD void transpose_bytes(Vector (&a)[16]) {
  Vector b[16];
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
}

ENCAST_SIMD __m128i load_bytes(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// 16 bytes of 16 rows to 16 columns; where these are narrower, each is written over by the next from its end
// on.
ENCAST_SIMD void turn(const uint8_t* const* rows, int64_t at, uint8_t* to, int64_t width) {
  __m128i bytes[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) bytes[i] = load_bytes(rows[i] + at);
  transpose_bytes(bytes);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * width), bytes[i]);
}

#if defined(__AVX512BW__)
// 16 bytes of 64 rows to 16 columns, each of which is stored as a whole: lane l has rows 16l to 16l + 15.
ENCAST_SIMD void turn_64(const uint8_t* const (&rows)[kTileRows], int64_t at, uint8_t* to) {
  __m512i bytes[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    bytes[i] = _mm512_castsi128_si512(load_bytes(rows[i] + at));
    bytes[i] = _mm512_inserti32x4(bytes[i], load_bytes(rows[16 + i] + at), 1);
    bytes[i] = _mm512_inserti32x4(bytes[i], load_bytes(rows[32 + i] + at), 2);
    bytes[i] = _mm512_inserti32x4(bytes[i], load_bytes(rows[48 + i] + at), 3);
  }
  transpose_bytes(bytes);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * kTileRows, bytes[i]);
}
#endif

// `count` rows of k bytes to k columns of `width` bytes, 8 or a multiple of 16 up to kTileRows; where there
// are fewer rows, the last one stands in for them. Of 8 rows, up to 8 bytes after the columns are written: a
// tile has kTileRows * k.
[[gnu::noinline]] void to_features(const uint8_t* a, int64_t stride, int64_t count, int64_t k, int64_t width,
                                   uint8_t* features) {
  const uint8_t* rows[kTileRows];
  for (int64_t i = 0; i < round_up(width, 16); ++i) rows[i] = a + (i < count ? i : count - 1) * stride;
  int64_t column = 0;
#if defined(__AVX512BW__)
  for (; width == kTileRows && column + 16 <= k; column += 16) {
    turn_64(rows, column, features + column * kTileRows);
  }
#endif
  for (; column + 16 <= k; column += 16) {
    for (int64_t first = 0; first < width; first += 16) {
      turn(rows + first, column, features + column * width + first, width);
    }
  }
  for (; column < k; ++column) {
    for (int64_t i = 0; i < width; ++i) features[column * width + i] = rows[i][column];
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
// The third lane begins `half_rows` after the first.
ENCAST_SIMD void store_rows(const __m512i (&sums)[kBlockOutputs], int32_t* to, int64_t lane_rows,
                            int64_t half_rows) {
  const __m512i low01 = _mm512_unpacklo_epi32(sums[0], sums[1]),
                high01 = _mm512_unpackhi_epi32(sums[0], sums[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(sums[2], sums[3]),
                high23 = _mm512_unpackhi_epi32(sums[2], sums[3]);
  const __m512i rows[4] = {_mm512_unpacklo_epi64(low01, low23), _mm512_unpackhi_epi64(low01, low23),
                           _mm512_unpacklo_epi64(high01, high23), _mm512_unpackhi_epi64(high01, high23)};
  ENCAST_UNROLL for (int i = 0; i < 4; ++i) {
    const auto lane = [&](int l) __attribute__((always_inline)) {
      return reinterpret_cast<__m128i*>(to + (l % 2 * lane_rows + l / 2 * half_rows + i) * kPanel);
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
