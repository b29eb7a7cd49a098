#pragma once
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/tile.h"
#include "simd/activation.h"

// What happens to sums after the last k, for sixteen columns at a time.
namespace encast {
namespace {

// The operands of sixteen columns: loaded once, applied to every row of a tile. The auxiliary vectors of a
// linear are padded to whole panels, so that these loads may be whole too.
template <bool kQuantized>
struct Columns;

template <>
struct Columns<false> {
  const F32x16 bias;

  // An absent bias is -0, which every sum keeps its bits with. Adding +0 would turn -0 into +0.
  ENCAST_SIMD Columns at(const GemmArgs& args, int64_t column) {
    return {args.bias != nullptr ? load(args.bias + column) : set1(-0.0f)};
  }
  [[gnu::always_inline]] F32x16 value(const GemmArgs&, int64_t, F32x16 sums) const { return sums + bias; }
};

template <>
struct Columns<true> {
  const F32x16 bias, scale;
  const I32x16 weight_sums;

  ENCAST_SIMD Columns at(const GemmArgs& args, int64_t column) {
    return {args.bias != nullptr ? load(args.bias + column) : set1(0.0f), load(args.w_scale + column),
            load_i32(args.w_colsum + column)};
  }
  [[gnu::always_inline]] F32x16 value(const GemmArgs& args, int64_t row, I32x16 sums) const {
    const I32x16 centered = sums - set1(args.a_zero[row]) * weight_sums;
    return fma(to_f32(centered), set1(args.a_scale[row]) * scale, bias);
  }
};

// Sums in registers straight to c: whole vectors, and no activation, or one in its coarse form
// and no residual.
template <class Dot, bool kCoarse>
ENCAST_SIMD void store_outputs(const GemmArgs& args, const Columns<Dot::kQuantized>& columns, int64_t row,
                               int64_t column, typename Dot::Sum sums, const Bump* bump) {
  F32x16 value = columns.value(args, row, sums);
  if constexpr (kCoarse) {
    value = minus_bump(*bump, value);
  } else if (args.residual != nullptr) {
    value = value + load(args.residual + row * args.residual_stride + column);
  }
  store(args.c + row * args.c_stride + column, value);
}

// How many of the sixteen lanes from column `first` on lie within `columns`.
ENCAST_SIMD int64_t lanes_within(int64_t columns, int64_t first) {
  const int64_t lanes = columns - first;
  return lanes < 0 ? 0 : lanes > 16 ? 16 : lanes;
}

ENCAST_SIMD const Bump* coarse_form(const GemmArgs& args) {
  return args.coarse && !args.exact ? bump_of(args.activation) : nullptr;
}

// Vectors whose polynomials are evaluated together. Each is a chain of dependent steps, so several hide each
// other's latency: int8 with gelu at 1024 x 3072 x 768 takes 6.5 ms one by one and 5.7 ms by four on AVX-512.
// Where there are sixteen registers it makes no difference but in the size of the code.
#if defined(__AVX512F__)
constexpr int kActivatedTogether = 4;
#else
constexpr int kActivatedTogether = 1;
#endif

// A staged tile of sums, `rows` x kWidth, to the `columns` columns of c that exist. Values stay in registers
// from the sums on: a function of its own for the activation, which would need no copy for each Dot, but
// reads them from memory, makes int8 with gelu a third slower. Arguments by value: see DotTiles::store_tile.
template <class Dot, int64_t kWidth = kPanel>
[[gnu::noinline]] void finish_tile(const GemmArgs args, const float* staged, int64_t row, int64_t rows,
                                   int64_t column, int64_t columns) {
  constexpr int kVectors = kActivatedTogether;
  // Of a row, or whole rows where a row has fewer.
  constexpr int kRowVectors = kVectors * 16 < kWidth ? kVectors : static_cast<int>(kWidth / 16);
  const Bump* const bump = coarse_form(args);
  for (int64_t i = 0; i < rows; i += kVectors / kRowVectors) {
    // Where the last group of rows is cut off, its last row stands in for the others and is written again.
    int64_t at[kVectors / kRowVectors];
    for (int r = 0; r < kVectors / kRowVectors; ++r) at[r] = i + r < rows ? i + r : rows - 1;
    for (int64_t first = 0; first < kWidth; first += 16 * kRowVectors) {
      const auto from = [&](int v) { return first + 16 * (v % kRowVectors); };
      const auto row_of = [&](int v) { return row + at[v / kRowVectors]; };
      F32x16 values[kVectors];
      ENCAST_UNROLL for (int v = 0; v < kVectors; ++v) {
        const auto operands = Columns<Dot::kQuantized>::at(args, column + from(v));
        const float* sums = staged + at[v / kRowVectors] * kWidth + from(v);
        values[v] = operands.value(args, row_of(v), load_sums(sums, Dot::zero()));
      }
      if (bump != nullptr) {
        ENCAST_UNROLL for (int v = 0; v < kVectors; ++v) values[v] = minus_bump(*bump, values[v]);
      } else {
        apply(args.activation, args.exact, values);
      }
      if (args.residual != nullptr) {
        ENCAST_UNROLL for (int v = 0; v < kVectors; ++v) {
          const float* residual = args.residual + row_of(v) * args.residual_stride + column + from(v);
          values[v] = values[v] + load_partial(residual, lanes_within(columns, from(v)));
        }
      }
      if (args.c_bf16 == nullptr) {
        ENCAST_UNROLL for (int v = 0; v < kVectors; ++v) {
          float* c = args.c + row_of(v) * args.c_stride + column + from(v);
          store_partial(c, lanes_within(columns, from(v)), values[v]);
        }
      } else {
        ENCAST_UNROLL for (int v = 0; v < kVectors; ++v) {
          const Mask16 exists = first_lanes(lanes_within(columns, from(v)));
          uint16_t* c = args.c_bf16 + row_of(v) * args.c_stride + column + from(v);
          store_bf16(c, select(exists, values[v], set1(0.0f)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace encast
