#pragma once
#include "kernels/rotary/rotary.h"
#include "simd/lanes.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

template <class Lanes>
ENCAST_SIMD void rotate_pairs(float* x, const float* table, int64_t half, Lanes lanes) {
  const F32x16 a = load(x, lanes), b = load(x + half, lanes);
  const F32x16 cos = load(table, lanes), sin = load(table + half, lanes);
  store(x, lanes, fnma(b, sin, a * cos));
  store(x + half, lanes, fma(b, cos, a * sin));
}

static inline void rotary_rows(const RotaryArgs& args, int64_t row_begin, int64_t row_end) {
  const int64_t half = args.head_dim / 2, turned = args.heads * args.head_dim;
  for (int64_t row = row_begin; row < row_end; ++row) {
    float* x = args.x + row * args.x_stride;
    const float* table = args.table + (row - args.first) * args.head_dim;
    for (int64_t head = 0; head < turned; head += args.head_dim) {
      int64_t pair = 0;
      for (; pair + 16 <= half; pair += 16) {
        rotate_pairs(x + head + pair, table + pair, half, AllLanes{});
      }
      if (pair < half) {
        rotate_pairs(x + head + pair, table + pair, half, SomeLanes{half - pair});
      }
    }
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
