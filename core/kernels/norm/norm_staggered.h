#pragma once
#include "kernels/norm/norm.h"
#include "kernels/norm/norm_row.h"

// Layer norm of many rows that are narrowed to q8: four rows at a time, each in another of the four passes. A
// pass ends in reductions that the next one waits for, and meanwhile the passes of the other rows go on. The
// operations on a row, and so its bits, are those of layer_norm_rows and narrow_row.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

constexpr int64_t kStaggeredCols = 4096;

// Whether norm_staggered takes the rows; with fewer rows it would be idle for too long.
ENCAST_SIMD bool may_stagger(const NormArgs& args, int64_t rows) {
  const bool own_scale =
      args.narrow.kind == NarrowOut::Kind::q8_zero_point || args.narrow.kind == NarrowOut::Kind::q8_symmetric;
  return own_scale && args.beta != nullptr && args.residual != nullptr && args.cols % 64 == 0 &&
         args.cols <= kStaggeredCols && rows >= 12;
}

// Arguments by value: a store of a vector may change any memory that is not the function's own.
static inline void norm_staggered(const NormArgs args, int64_t row_begin, int64_t row_end) {
  // Before the first row and after the last, passes go over these.
  alignas(64) float idle[kStaggeredCols];
  alignas(64) uint8_t idle_codes[kStaggeredCols];
  const F32x16 none = set1(0.0f);
  for (int64_t col = 0; col < args.cols; col += 16) store(idle + col, none);
  const float count = static_cast<float>(args.cols);
  F32x16 mean2 = none, mean3 = none, inverse3 = none, reciprocal4 = none;  // of the row in that pass
  I32x16 zero4 = set1(0);
  for (int64_t row = row_begin; row < row_end + 3; ++row) {
    const auto out_of = [&](int64_t at) ENCAST_SIMD_BODY {
      return at >= row_begin && at < row_end ? args.out + at * args.out_stride : idle;
    };
    const int64_t read = row < row_end ? row : row_end - 1;
    const float* const x = args.x + read * args.x_stride;
    const float* const residual = args.residual + read * args.residual_stride;
    // It comes from memory that cores share, and no prefetcher crosses a page.
    const float* const next_residual = row + 1 < row_end ? residual + args.residual_stride : residual;
    float *const out1 = out_of(row), *const out2 = out_of(row - 1), *const out3 = out_of(row - 2);
    const float* const out4 = out_of(row - 3);
    uint8_t* const codes4 = row - 3 < row_begin
                                ? idle_codes
                                : static_cast<uint8_t*>(args.narrow.data) + (row - 3) * args.narrow.stride;
    F32x16 sum[kStreams], squares[kStreams];
    fill(sum, 0.0f);
    fill(squares, 0.0f);
    Extremes found = no_extremes();
    for (int64_t col = 0; col < args.cols; col += 64) {
      I32x16 codes[4];
#pragma GCC unroll 4
      for (int i = 0; i < kStreams; ++i) {
        const int64_t at = col + 16 * i;
        __builtin_prefetch(next_residual + at);
        codes[i] = to_i32(load(out4 + at) * reciprocal4) + zero4;
        const F32x16 unit = (load(out3 + at) - mean3) * inverse3;
        const F32x16 y = fma(unit, load(args.gamma + at), load(args.beta + at));
        store(out3 + at, y);
        include(found, y);
        const F32x16 deviation = load(out2 + at) - mean2;
        squares[i] = fma(deviation, deviation, squares[i]);
        const F32x16 one = load(x + at) + load(residual + at);
        store(out1 + at, one);
        sum[i] = sum[i] + one;
      }
      store_i32(reinterpret_cast<int32_t*>(codes4 + col), pack_codes<false>(codes));
    }
    const RowScale scale = row_scale(args.narrow.kind, found);
    if (row - 2 >= row_begin && row - 2 < row_end) {
      args.narrow.scale[row - 2] = scale.scale;
      args.narrow.zero[row - 2] = scale.zero;
    }
    reciprocal4 = set1(scale.reciprocal);
    zero4 = set1(scale.zero);
    inverse3 = set1(1.0f / __builtin_sqrtf(reduce_add(squares) / count + args.eps));
    mean3 = mean2;
    mean2 = set1(reduce_add(sum) / count);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
