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

// A staged tile of sums, `rows` x kPanel, to the `columns` columns of c that exist. Values stay in registers
// from the sums on: a function of its own for the activation, which would need no copy for each Dot, but
// reads them from memory, makes int8 with gelu a third slower. Arguments by value: see DotTiles::store_tile.
template <class Dot>
[[gnu::noinline]] void finish_tile(const GemmArgs args, const float* staged, int64_t row, int64_t rows,
                                   int64_t column, int64_t columns) {
  const Bump* const bump = coarse_form(args);
  for (int64_t i = row; i < row + rows; ++i, staged += kPanel) {
    for (int64_t first = 0; first < kPanel; first += 16 * kActivatedTogether) {
      F32x16 values[kActivatedTogether];
      ENCAST_UNROLL for (int v = 0; v < kActivatedTogether; ++v) {
        const int64_t from = first + 16 * v;
        const auto operands = Columns<Dot::kQuantized>::at(args, column + from);
        values[v] = operands.value(args, i, load_sums(staged + from, Dot::zero()));
      }
      if (bump != nullptr) {
        ENCAST_UNROLL for (int v = 0; v < kActivatedTogether; ++v) values[v] = minus_bump(*bump, values[v]);
      } else {
        apply(args.activation, args.exact, values);
      }
      if (args.residual != nullptr) {
        const float* residual = args.residual + i * args.residual_stride + column;
        ENCAST_UNROLL for (int v = 0; v < kActivatedTogether; ++v) {
          const int64_t from = first + 16 * v;
          values[v] = values[v] + load_partial(residual + from, lanes_within(columns, from));
        }
      }
      if (args.c_bf16 == nullptr) {
        ENCAST_UNROLL for (int v = 0; v < kActivatedTogether; ++v) {
          const int64_t from = first + 16 * v;
          store_partial(args.c + i * args.c_stride + column + from, lanes_within(columns, from), values[v]);
        }
      } else {
        ENCAST_UNROLL for (int v = 0; v < kActivatedTogether; ++v) {
          const int64_t from = first + 16 * v;
          const Mask16 exists = first_lanes(lanes_within(columns, from));
          store_bf16(args.c_bf16 + i * args.c_stride + column + from, select(exists, values[v], set1(0.0f)));
        }
      }
    }
  }
}

// Sums as they are, between c and a staged tile.
[[gnu::noinline]] void copy_sums(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                                 int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t first = 0; first < columns; first += 16) {
      const int64_t lanes = lanes_within(columns, first);
      store_partial(to + i * to_stride + first, lanes, load_partial(from + i * from_stride + first, lanes));
    }
  }
}

}  // namespace
}  // namespace encast
