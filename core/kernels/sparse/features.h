#pragma once
#include <immintrin.h>

#include "simd/vec.h"

// Rows of bytes to columns: what a sparse product reads of a token is scattered, of a column it is not.
namespace encast {
namespace {

// Rows i of 16 bytes to columns: byte j of row i becomes byte i of row j.
ENCAST_SIMD void transpose_bytes(const uint8_t* const (&rows)[16], int64_t at, uint8_t* to,
                                 int64_t to_stride) {
  __m128i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + at));
  // Each round interleaves the first eight with the last eight; the fourth has all bytes in their places.
  const auto interleave = [](const __m128i(&from)[16], __m128i(&into)[16]) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      into[2 * i] = _mm_unpacklo_epi8(from[i], from[i + 8]);
      into[2 * i + 1] = _mm_unpackhi_epi8(from[i], from[i + 8]);
    }
  };
  interleave(a, b);
  interleave(b, a);
  interleave(a, b);
  interleave(b, a);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * to_stride), a[i]);
}

// `count` rows of k bytes to k columns of `width` bytes, a multiple of 16; where there are fewer rows, the
// last one stands in for them.
[[gnu::noinline]] void to_features(const uint8_t* a, int64_t stride, int64_t count, int64_t k, int64_t width,
                                   uint8_t* features) {
  for (int64_t first = 0; first < width; first += 16) {
    const uint8_t* rows[16];
    for (int64_t i = 0; i < 16; ++i) rows[i] = a + (first + i < count ? first + i : count - 1) * stride;
    int64_t column = 0;
    for (; column + 16 <= k; column += 16) {
      transpose_bytes(rows, column, features + column * width + first, width);
    }
    for (; column < k; ++column) {
      for (int64_t i = 0; i < 16; ++i) features[column * width + first + i] = rows[i][column];
    }
  }
}

}  // namespace
}  // namespace encast
