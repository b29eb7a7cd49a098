#pragma once
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_row.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

static inline void norm_rows(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  const LayerNorm norm = {args.gamma, args.beta, args.eps};
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* out = args.out + row * args.out_stride;
    Extremes extremes;
    if (args.residual != nullptr) {
      const float* residual = args.residual + row * args.residual_stride;
      extremes = layer_norm_row(args.cols, norm, out, [&](int64_t col, auto lanes) ENCAST_SIMD_BODY {
        return load(x + col, lanes) + load(residual + col, lanes);
      });
    } else {
      extremes = layer_norm_row(args.cols, norm, out, [&](int64_t col, auto lanes) ENCAST_SIMD_BODY {
        return load(x + col, lanes);
      });
    }
    narrow_row(args.narrow, row, out, args.cols, extremes);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
