#pragma once
#include "kernels/quantize/narrow_row.h"

// Layer norm of one row, shared by norm and embed, and RMS norm.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

struct LayerNorm {
  const float* gamma;
  const float* beta;  // of a norm that is centred
  float eps;
};

// Rows that are normalised together: each waits for three reductions, the root and the division, in which the
// others go on.
#if defined(ENCAST_SIMD_IS_AVX512)
constexpr int kNormRows = 2;
#else
constexpr int kNormRows = 1;
#endif

// out[r] = norm(row r of source), with source(r, column, lanes); a row passes through `out`, which stays in
// L1, three times: sum, squares around the mean, result. One that is not centred (RMS norm) has its squares
// in the first pass, and no second. Notes the result's extremes.
template <int rows, bool centred = true, class Source>
ENCAST_SIMD void layer_norm_rows(int64_t cols, const LayerNorm& norm, float* const (&out)[rows],
                                 Extremes (&extremes)[rows], Source source) {
  const auto each_row = [](auto body) ENCAST_SIMD_BODY {
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) body(r);
  };
  F32x16 sum[rows][kStreams];
  each_row([&](int r) ENCAST_SIMD_BODY { fill(sum[r], 0.0f); });
  for_columns(cols, [&](int i, int64_t col, auto lanes) ENCAST_SIMD_BODY {
    each_row([&](int r) ENCAST_SIMD_BODY {
      const F32x16 x = source(r, col, lanes);
      store(out[r] + col, lanes, x);
      sum[r][i] = centred ? sum[r][i] + x : fma(x, x, sum[r][i]);
    });
  });
  const float count = static_cast<float>(cols);
  float mean[rows], variance[rows];
  each_row([&](int r) ENCAST_SIMD_BODY { mean[r] = reduce_add(sum[r]) / count; });

  if constexpr (centred) {
    F32x16 squares[rows][kStreams];
    each_row([&](int r) ENCAST_SIMD_BODY { fill(squares[r], 0.0f); });
    for_columns(cols, [&](int i, int64_t col, auto lanes) ENCAST_SIMD_BODY {
      each_row([&](int r) ENCAST_SIMD_BODY {
        const F32x16 deviation = load(out[r] + col, lanes, mean[r]) - set1(mean[r]);
        squares[r][i] = fma(deviation, deviation, squares[r][i]);
      });
    });
    each_row([&](int r) ENCAST_SIMD_BODY { variance[r] = reduce_add(squares[r]) / count; });
  } else {
    each_row([&](int r) ENCAST_SIMD_BODY { variance[r] = mean[r]; });
  }

  F32x16 inverse[rows];
  Extremes found[rows];  // in registers, which what the caller sees would not be
  each_row([&](int r) ENCAST_SIMD_BODY {
    inverse[r] = set1(1.0f / __builtin_sqrtf(variance[r] + norm.eps));
    found[r] = no_extremes();
  });
  for_columns(cols, [&](int, int64_t col, auto lanes) ENCAST_SIMD_BODY {
    const F32x16 gamma = load(norm.gamma + col, lanes);
    const F32x16 beta = centred ? load(norm.beta + col, lanes) : gamma;  // read by centred ones alone
    each_row([&](int r) ENCAST_SIMD_BODY {
      // Lanes past the row hold the mean (or zero), gamma = 0 and beta = 0: a zero, or a NaN when the whole
      // row is one.
      F32x16 y;
      if constexpr (centred) {
        const F32x16 unit = (load(out[r] + col, lanes, mean[r]) - set1(mean[r])) * inverse[r];
        y = fma(unit, gamma, beta);
      } else {
        y = load(out[r] + col, lanes) * inverse[r] * gamma;
      }
      store(out[r] + col, lanes, y);
      include(found[r], y);
    });
  });
  each_row([&](int r) ENCAST_SIMD_BODY { extremes[r] = found[r]; });
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
