#pragma once
#include "kernels/gated/gated.h"
#include "kernels/quantize/narrow_row.h"
#include "simd/activation.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// n vectors from column `col` on; the activation is chosen once for all of them. Lanes behind the last column
// are 0 in, and 0 out.
template <int n, class Lanes>
ENCAST_SIMD void gated_block(const GatedArgs& args, const float* x, float* out, int64_t col, Lanes lanes,
                             Extremes& extremes) {
  F32x16 y[n];
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) y[i] = load(x + col + 16 * i, lanes);
  apply(args.activation, args.exact, y);
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) {
    y[i] = y[i] * load(x + args.cols + col + 16 * i, lanes);
    store(out + col + 16 * i, lanes, y[i]);
    include(extremes, y[i]);
  }
}

static inline void gated_rows(const GatedArgs& args, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* out = args.out + row * args.out_stride;
    Extremes extremes = no_extremes();
    int64_t col = 0;
    for (; col + 64 <= args.cols; col += 64) gated_block<4>(args, x, out, col, AllLanes{}, extremes);
    for (; col < args.cols; col += 16) {
      const int64_t left = args.cols - col;
      gated_block<1>(args, x, out, col, SomeLanes{left < 16 ? left : 16}, extremes);
    }
    narrow_row(args.narrow, row, out, args.cols, extremes);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
