#pragma once
#include "kernels/quantize/narrow_row.h"

// Layer norm of one row, shared by norm and embed.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

struct LayerNorm {
  const float* gamma;
  const float* beta;
  float eps;
};

// out = norm(source), with source(column, lanes) giving the row; the row passes through `out`, which stays in
// L1, three times: sum, squares around the mean, result. Returns the result's extremes.
template <class Source>
ENCAST_SIMD Extremes layer_norm_row(int64_t cols, const LayerNorm& norm, float* out, Source source) {
  F32x16 sum[kStreams];
  fill(sum, 0.0f);
  for_columns(cols, [&](int i, int64_t col, auto lanes) ENCAST_SIMD_BODY {
    const F32x16 x = source(col, lanes);
    store(out + col, lanes, x);
    sum[i] = sum[i] + x;
  });
  const float count = static_cast<float>(cols);
  const float mean = reduce_add(sum) / count;

  F32x16 squares[kStreams];
  fill(squares, 0.0f);
  for_columns(cols, [&](int i, int64_t col, auto lanes) ENCAST_SIMD_BODY {
    const F32x16 deviation = load(out + col, lanes, mean) - set1(mean);
    squares[i] = fma(deviation, deviation, squares[i]);
  });
  const float variance = reduce_add(squares) / count;
  const F32x16 inverse = set1(1.0f / __builtin_sqrtf(variance + norm.eps));

  Extremes extremes = no_extremes();
  for_columns(cols, [&](int, int64_t col, auto lanes) ENCAST_SIMD_BODY {
    // Lanes past the row hold the mean, gamma = 0 and beta = 0: a zero, or a NaN when the whole row is one.
    const F32x16 unit = (load(out + col, lanes, mean) - set1(mean)) * inverse;
    const F32x16 y = fma(unit, load(norm.gamma + col, lanes), load(norm.beta + col, lanes));
    store(out + col, lanes, y);
    include(extremes, y);
  });
  return extremes;
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
