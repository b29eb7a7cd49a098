#pragma once
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_row.h"
#include "kernels/norm/norm_staggered.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// Arguments by value: a store of a vector may change any memory that is not the function's own.
template <int rows, bool centred>
ENCAST_SIMD void norm_some(const NormArgs args, int64_t row) {
  const LayerNorm norm = {args.gamma, args.beta, args.eps};
  const float* const x = args.x + row * args.x_stride;
  float* out[rows];
  for (int r = 0; r < rows; ++r) out[r] = args.out + (row + r) * args.out_stride;
  Extremes extremes[rows];
  if (args.residual != nullptr) {
    const float* const residual = args.residual + row * args.residual_stride;
    layer_norm_rows<rows, centred>(args.cols, norm, out, extremes,
                                   [&](int r, int64_t col, auto lanes) ENCAST_SIMD_BODY {
                                     return load(x + r * args.x_stride + col, lanes) +
                                            load(residual + r * args.residual_stride + col, lanes);
                                   });
  } else {
    layer_norm_rows<rows, centred>(args.cols, norm, out, extremes,
                                   [&](int r, int64_t col, auto lanes)
                                       ENCAST_SIMD_BODY { return load(x + r * args.x_stride + col, lanes); });
  }
  for (int r = 0; r < rows; ++r) narrow_row(args.narrow, row + r, out[r], args.cols, extremes[r]);
}

template <bool centred>
ENCAST_SIMD void norm_all(const NormArgs& args, int64_t row_begin, int64_t row_end) {
  int64_t row = row_begin;
  for (; row + kNormRows <= row_end; row += kNormRows) norm_some<kNormRows, centred>(args, row);
  for (; row < row_end; ++row) norm_some<1, centred>(args, row);
}

static inline void norm_rows(const NormArgs& args, int64_t row_begin, int64_t row_end) {
#if defined(ENCAST_SIMD_IS_AVX512)
  if (may_stagger(args, row_end - row_begin)) return norm_staggered(args, row_begin, row_end);
#endif
  args.beta != nullptr ? norm_all<true>(args, row_begin, row_end) : norm_all<false>(args, row_begin, row_end);
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
