#pragma once
#include "simd/vec.h"

// Walking along the columns of a row.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// Which lanes of a vector hold columns: all of them, or the first n. Memory of the others is not touched.
struct AllLanes {};
struct SomeLanes {
  int64_t n;
};
ENCAST_SIMD F32x16 load(const float* p, AllLanes, float = 0) { return load(p); }
ENCAST_SIMD F32x16 load(const float* p, SomeLanes lanes, float fill = 0) {
  return load_partial(p, lanes.n, fill);
}
ENCAST_SIMD void store(float* p, AllLanes, F32x16 a) { store(p, a); }
ENCAST_SIMD void store(float* p, SomeLanes lanes, F32x16 a) { store_partial(p, lanes.n, a); }

// Vectors in flight: sums are kept in four, so that one addition need not wait for the other.
constexpr int kStreams = 4;

// body(stream, column, lanes) for every vector of `cols` columns, in order; `stream` counts 0, 1, 2, 3, 0,
// ... and is a constant once inlined.
template <class Body>
ENCAST_SIMD void for_columns(int64_t cols, Body body) {
  int64_t col = 0;
  for (; col + 16 * kStreams <= cols; col += 16 * kStreams) {
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; ++i) body(i, col + 16 * i, AllLanes{});
  }
#pragma GCC unroll 4
  for (int i = 0; i < kStreams; ++i) {
    const int64_t left = cols - col - 16 * i;
    if (left <= 0) break;
    body(i, col + 16 * i, SomeLanes{left < 16 ? left : 16});
  }
}

// One value in every stream.
ENCAST_SIMD void fill(F32x16 (&streams)[kStreams], float x) {
#pragma GCC unroll 4
  for (int i = 0; i < kStreams; ++i) streams[i] = set1(x);
}
ENCAST_SIMD float reduce_add(const F32x16 (&s)[kStreams]) {
  return reduce_add((s[0] + s[1]) + (s[2] + s[3]));
}
ENCAST_SIMD float reduce_max(const F32x16 (&s)[kStreams]) {
  return reduce_max(max(max(s[0], s[1]), max(s[2], s[3])));
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
