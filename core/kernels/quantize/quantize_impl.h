#pragma once
#include "kernels/quantize/narrow_row.h"
#include "kernels/quantize/quantize.h"

namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

static inline void narrow_rows(const NarrowArgs& args, int64_t row_begin, int64_t row_end) {
  const bool needs_extremes =
      args.out.kind == NarrowOut::Kind::q8_symmetric || args.out.kind == NarrowOut::Kind::q8_zero_point;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* x = args.x + row * args.x_stride;
    Extremes extremes = no_extremes();
    if (needs_extremes) {
      for_columns(args.cols, [&](int, int64_t col, auto lanes)
                                 ENCAST_SIMD_BODY { include(extremes, load(x + col, lanes)); });
    }
    narrow_row(args.out, row, x, args.cols, extremes);
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
