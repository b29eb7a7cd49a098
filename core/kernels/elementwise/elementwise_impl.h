#pragma once
#include "kernels/elementwise/elementwise.h"
#include "simd/activation.h"
#include "simd/lanes.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// n vectors from column `col` on; the activation is chosen once for all of them.
template <int n, class Lanes>
ENCAST_SIMD void elementwise_block(const ElementwiseArgs& args, int64_t row, int64_t col, Lanes lanes) {
  const float* x = args.x + row * args.x_stride + col;
  F32x16 y[n];
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) y[i] = set1(args.factor) * load(x + 16 * i, lanes);
  if (args.other != nullptr) {
    const float* other = args.other + row * args.other_stride + col;
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) y[i] = y[i] + load(other + 16 * i, lanes);
  }
  apply(args.activation, args.exact, y);
  float* out = args.out + row * args.out_stride + col;
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) store(out + 16 * i, lanes, y[i]);
}

static inline void elementwise_rows(const ElementwiseArgs& args, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    int64_t col = 0;
    for (; col + 64 <= args.cols; col += 64) elementwise_block<4>(args, row, col, AllLanes{});
    for (; col < args.cols; col += 16) {
      const int64_t left = args.cols - col;
      elementwise_block<1>(args, row, col, SomeLanes{left < 16 ? left : 16});
    }
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
