#pragma once
#include <cstddef>

#include "kernels/reduce/reduce.h"
#include "simd/lanes.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

ENCAST_SIMD void copy_row(const float* x, float* out, int64_t cols) {
  __builtin_memmove(out, x, static_cast<size_t>(cols) * sizeof(float));
}

// The larger of both; unlike max(), once NaN it stays NaN.
ENCAST_SIMD F32x16 max_keeping_nan(F32x16 running, F32x16 x) {
  return select(is_nan(running), running, max(running, x));
}

// A pooling mode as a fold over tokens and a divisor.
template <Pooling mode>
ENCAST_SIMD F32x16 fold(F32x16 running, F32x16 x, int64_t index) {
  if constexpr (mode == Pooling::max) return max_keeping_nan(running, x);
  if constexpr (mode == Pooling::weightedmean) return fma(x, set1(static_cast<float>(index + 1)), running);
  return running + x;
}
template <Pooling mode>
ENCAST_SIMD float divisor(int64_t length) {
  const double n = static_cast<double>(length);
  if constexpr (mode == Pooling::mean) return static_cast<float>(n);
  if constexpr (mode == Pooling::mean_sqrt_len_tokens) return __builtin_sqrtf(static_cast<float>(n));
  if constexpr (mode == Pooling::weightedmean) return static_cast<float>(n * (n + 1) / 2);
  return 1.0f;
}

// n vectors of columns over all tokens of a sequence, tokens in order.
template <Pooling mode, int n, class Lanes>
ENCAST_SIMD void pool_block(const float* x, int64_t stride, int64_t length, float* out, Lanes lanes) {
  F32x16 running[n];
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i) running[i] = set1(mode == Pooling::max ? -__builtin_inff() : 0.0f);
  for (int64_t t = 0; t < length; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) running[i] = fold<mode>(running[i], load(x + t * stride + 16 * i, lanes), t);
  }
  const F32x16 count = set1(divisor<mode>(length));
#pragma GCC unroll 4
  for (int i = 0; i < n; ++i)
    store(out + 16 * i, lanes, mode == Pooling::max ? running[i] : running[i] / count);
}

template <Pooling mode>
ENCAST_SIMD void pool_sequence(const float* x, int64_t stride, int64_t length, int64_t cols, float* out) {
  int64_t col = 0;
  for (; col + 64 <= cols; col += 64) pool_block<mode, 4>(x + col, stride, length, out + col, AllLanes{});
  for (; col < cols; col += 16) {
    const int64_t left = cols - col;
    pool_block<mode, 1>(x + col, stride, length, out + col, SomeLanes{left < 16 ? left : 16});
  }
}

static inline void pool_rows(const PoolArgs& args, int64_t seq_begin, int64_t seq_end) {
  for (int64_t seq = seq_begin; seq < seq_end; ++seq) {
    const int64_t begin = args.cu_seqlens[seq], length = args.cu_seqlens[seq + 1] - begin;
    const float* x = args.x + begin * args.x_stride;
    float* out = args.out + seq * args.out_stride;
    if (length == 0) {
      __builtin_memset(out, 0, static_cast<size_t>(args.cols) * sizeof(float));
      continue;
    }
    switch (args.mode) {
      case Pooling::cls:
        copy_row(x, out, args.cols);
        break;
      case Pooling::lasttoken:
        copy_row(x + (length - 1) * args.x_stride, out, args.cols);
        break;
#define ENCAST_CASE(mode)                                                   \
  case Pooling::mode:                                                       \
    pool_sequence<Pooling::mode>(x, args.x_stride, length, args.cols, out); \
    break;
        ENCAST_CASE(max)
        ENCAST_CASE(mean)
        ENCAST_CASE(mean_sqrt_len_tokens)
        ENCAST_CASE(weightedmean)
#undef ENCAST_CASE
    }
  }
}

static inline void gather_rows(const GatherArgs& args, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    copy_row(args.x + args.rows[row] * args.x_stride, args.out + row * args.out_stride, args.cols);
  }
}

static inline void normalize_rows(const NormalizeArgs& args, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = args.x + row * args.x_stride;
    float* out = args.out + row * args.out_stride;
    F32x16 squares[kStreams];
    fill(squares, 0.0f);
    for_columns(args.cols, [&](int i, int64_t col, auto lanes) ENCAST_SIMD_BODY {
      const F32x16 v = load(x + col, lanes);
      squares[i] = fma(v, v, squares[i]);
    });
    const float length = __builtin_sqrtf(reduce_add(squares));
    const F32x16 bounded = set1(length < 1e-12f ? 1e-12f : length);
    for_columns(args.cols, [&](int, int64_t col, auto lanes)
                               ENCAST_SIMD_BODY { store(out + col, lanes, load(x + col, lanes) / bounded); });
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
