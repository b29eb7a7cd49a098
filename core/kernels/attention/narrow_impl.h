#pragma once
#include "kernels/attention/local.h"
#include "kernels/attention/narrow_tiles.h"
#include "kernels/attention/spans.h"

// Attention in narrow products, once for every level; README.md has the drawing, ir/ops.py the definition.
//
// A level brings Products, which has
//   kRows, kVectors            of its largest register tile
//   kGroup                     codes of 32 bits: 4 bytes or 2 halves
//   kIntegers                  codes are integers with scales; else bf16
//   kOffset                    what is added to the codes of queries: 128 where the instruction wants them
//                              unsigned, else 0. Sums start at minus kOffset times the sum of the key's codes
//   kSignedQueries             integers only: codes of queries are kept signed, not offset
//   Sum                        sixteen sums: I32x16 or F32x16
//   row(p), columns(p)         operands: a group of a row for all columns, a group of sixteen columns
//   add(sum, row, columns)
//   round_pair(a, b)           bf16 only: 32 codes in order
//   interleave_pair(codes)     bf16 only: codes i and 16 + i side by side
// Products of tiles have no rows, vectors and operands, but what narrow_tiles.h says.
// Integer sums are exact, everything else is a fixed order of operations on the virtual lanes, so all levels
// of integers give the same bits.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

constexpr float kLog2E = 0x1.715476p+0f;
// Powers have 255 levels: its logarithms.
constexpr float kLog2Levels = 0x1.ffa37cp+2f, kLnLevels = 0x1.62a410p+2f;

// 2^x with a relative error of 2.9e-6 (integers) or 1.1e-7, rounding aside: small beside half a code (1/510
// of the largest power, or 2^-9 of each), so that few powers get another code than their definition's. Least
// squares reweighted after Lawson, as in simd/math.h. What is below 2^-100 counts as that; NaN passes.
//
// Step by step for all vectors, so that no chain has to be found behind another one; README.md has how little
// that brings.
template <bool kIntegers, int n>
ENCAST_SIMD void powers_of_2(F32x16 (&x)[n]) {
  constexpr float kShort[] = {1.0f, 0x1.62e12cp-1f, 0x1.ec0378p-3f, 0x1.c9fc5ap-5f, 0x1.3a02e0p-7f};
  constexpr float kLong[] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9bcp-3f,
                             0x1.c6b752p-5f, 0x1.3cea90p-7f, 0x1.5bba24p-10f};
  constexpr int kDegree = kIntegers ? 4 : 5;
  const auto coefficient = [&](int i) ENCAST_SIMD_BODY { return set1(kIntegers ? kShort[i] : kLong[i]); };
  F32x16 whole[n], value[n];
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = max(set1(-100.0f), x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) whole[i] = round(x[i]);
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = x[i] - whole[i];
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) value[i] = coefficient(kDegree);
#pragma GCC unroll 8
  for (int c = kDegree - 1; c >= 0; --c) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) value[i] = fma(value[i], x[i], coefficient(c));
  }
#pragma GCC unroll 8
  for (int i = 0; i < n; ++i) x[i] = times_power_of_2(value[i], whole[i]);
}
template <bool kIntegers, bool exact, int n>
ENCAST_SIMD void powers(F32x16 (&x)[n]) {
  if constexpr (exact) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) x[i] = exp_exact(max(set1(-100.0f), x[i]));
  } else {
    powers_of_2<kIntegers>(x);
  }
}

// Codes of one row's powers from its scores, and the sums of the powers in sixteen lanes. Codes are written
// for whole groups of 64 keys. Powers are 2^(score * factor + shift), where the shift takes the largest score
// away and, for integers, makes the largest power the largest code.
template <class Products, bool exact>
ENCAST_SIMD void power_row(const float* scores, int64_t keys, float factor, float shift, uint8_t* codes_to,
                           float* lanes) {
  constexpr int kGroup = Products::kGroup;
  F32x16 sum[kStreams];
  fill(sum, 0.0f);
  // The first `count` of four vectors of powers from `key` on; the others are 0.
  const auto powers_at = [&](int64_t key, auto count, F32x16(&x)[4]) ENCAST_SIMD_BODY {
    F32x16 some[count.value];
#pragma GCC unroll 4
    for (int i = 0; i < count.value; ++i) {
      some[i] = fma(load(scores + key + 16 * i), set1(factor), set1(shift));
    }
    powers<Products::kIntegers, exact>(some);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = i < count.value ? some[i < count.value ? i : 0] : set1(0.0f);
  };
  const auto put = [&](const F32x16(&powers)[4], int64_t key) ENCAST_SIMD_BODY {
    uint8_t* to = codes_to + key * (4 / kGroup);
    if constexpr (Products::kIntegers) {
      I32x16 codes[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sum[i] = sum[i] + powers[i];
        // Rounding in the exponent may make the largest power a little larger than its code.
        codes[i] = kGroup == 4 ? to_i32(powers[i]) : min(to_i32(powers[i]), set1(255));
      }
#pragma GCC unroll 2
      for (int part = 0; part < 4; part += kGroup) {
        I32x16 some[kGroup];
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; ++j) some[j] = codes[part + j];
        store_i32(reinterpret_cast<int32_t*>(to + 16 * part * (4 / kGroup)), pack_codes<false>(some));
      }
    } else {
#pragma GCC unroll 2
      for (int part = 0; part < 4; part += 2) {
        const I32x16 rounded = Products::round_pair(powers[part], powers[part + 1]);
        store_i32(reinterpret_cast<int32_t*>(to + 32 * part), rounded);
        sum[part] = sum[part] + from_bits(shift_left<16>(rounded));
        sum[part + 1] = sum[part + 1] + from_bits(rounded & set1(static_cast<int32_t>(0xffff0000u)));
      }
    }
  };
  // What lies behind the last key of its vector is minus infinity.
  for (int64_t key = 0; key < keys; key += 64) {
    with_count<4>((keys - key + 15) / 16, [&](auto count) ENCAST_SIMD_BODY {
      F32x16 x[4];
      powers_at(key, count, x);
      put(x, key);
    });
  }
  store(lanes, (sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Softmax of sixteen rows, of which `count` exist, over one block of keys. With more than one block the
// largest score runs along, and what was summed before decays to the new one.
template <class Products, bool exact>
ENCAST_SIMD_TILE void power_rows(const NarrowHead& head, int64_t row, int64_t count, int64_t keys, bool first,
                                 bool last) {
  F32x16 lanes[16];
  const auto load_lanes = [&]() ENCAST_SIMD_BODY {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) lanes[i] = i < count ? load(head.lanes + (row + i) * 16) : set1(0.0f);
  };
  load_lanes();
  F32x16 top = max_lanes(lanes);
  // With a bias the factor is in the scores already.
  const float* factors = head.bias == nullptr ? head.factors : head.ones;
  F32x16 decay = set1(0.0f);
  if (!first) {
    const F32x16 before = load(head.tops + row);
    top = max(before, top);
    F32x16 exponent[1] = {(before - top) * load(factors + row)};
    powers<Products::kIntegers, exact>(exponent);
    decay = exponent[0];
  }
  store(head.tops + row, top);
  store(head.decays + row, decay);
  const float levels = Products::kIntegers ? (exact ? kLnLevels : kLog2Levels) : 0.0f;
  store(head.shifts + row, fnma(top, load(factors + row), set1(levels)));
  for (int64_t i = row; i < row + count; ++i) {
    power_row<Products, exact>(head.scores + i * head.score_stride, keys, factors[i], head.shifts[i],
                               head.powers + i * head.power_bytes, head.lanes + i * 16);
  }
  load_lanes();
  F32x16 sum = add_lanes(lanes);
  if (!first) sum = fma(load(head.sums + row), decay, sum);
  store(head.sums + row, sum);
  if (last) store(head.inverses + row, set1(1.0f) / sum);
}

// Hides from queries what lies outside of their reach, and finds their largest scores anew.
static inline void hide_far_rows(const NarrowHead& head, int64_t query, int64_t rows, int64_t begin,
                                 int64_t end, int64_t reach) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t here = query + row - begin;
    store(head.lanes + row * 16,
          hide_far(head.scores + row * head.score_stride, end - begin, here - reach, here + reach));
  }
}

template <class Products>
ENCAST_SIMD void narrow_span(const AttentionArgs& args, const Span& span, int64_t head_index, void* scratch) {
  const int64_t first_row = span.first, len = span.len;
  const int64_t query_begin = span.query_begin, query_end = span.query_end;
  const int64_t hidden = static_cast<int64_t>(args.heads) * args.head_dim;
  const float* q = args.qkv + first_row * args.qkv_stride + head_index * args.head_dim;
  const NarrowParts parts = narrow_parts(len, args.head_dim, Products::kGroup, kUsesTiles<Products>);
  const int64_t most_keys = len < kKeyBlock ? round_up_to(len, kKeyPanel) : kKeyBlock;
  uint8_t* next = static_cast<uint8_t*>(scratch);
  const auto take = [&](int64_t bytes) {
    uint8_t* part = next;
    next += bytes;
    return part;
  };
  const auto floats = [&](int64_t bytes) { return reinterpret_cast<float*>(take(bytes)); };
  const int64_t dims = round_up_to(args.head_dim, 16);
  NarrowHead head;
  head.q = q;
  head.k = q + hidden;
  head.v = q + 2 * hidden;
  head.stride = args.qkv_stride;
  head.bias =
      args.bias == nullptr ? nullptr : args.bias + head_index * (2 * args.bias_len - 1) + args.bias_len - 1;
  head.scale = args.scale;
  head.unit = args.exact ? 1.0f : kLog2E;
  head.exact = args.exact;
  head.out = args.out + first_row * args.out_stride + head_index * args.head_dim;
  head.out_stride = args.out_stride;
  head.query_begin = query_begin;
  head.len = len;
  head.head_dim = args.head_dim;
  head.dims = dims;
  head.keys = take(parts.keys);
  head.panel_bytes = parts.keys / (round_up_to(len, kKeyPanel) / kKeyPanel);
  head.corrections = reinterpret_cast<int32_t*>(take(parts.corrections));
  head.values = take(parts.values);
  head.queries = take(parts.queries);
  head.query_bytes = round_up_to(args.head_dim * (4 / Products::kGroup), 64);
  head.scores = floats(parts.scores);
  head.score_stride = most_keys + kRowGap / 4;
  head.powers = take(parts.powers);
  head.power_bytes = most_keys * (4 / Products::kGroup) + kRowGap;
  head.context = floats(parts.context);
  head.lanes = floats(parts.lanes);
  const int64_t row_room = parts.rows / kRowVectors / 4;
  head.factors = floats(parts.rows);
  head.tops = head.factors + row_room;
  head.shifts = head.tops + row_room;
  head.sums = head.shifts + row_room;
  head.decays = head.sums + row_room;
  head.inverses = head.decays + row_room;
  head.ones = head.inverses + row_room;
  head.key_centre = floats(parts.channels);
  head.key_inverse = head.key_centre + dims;
  head.key_scale = head.key_inverse + dims;
  head.value_centre = head.key_scale + dims;
  head.value_scale = head.value_centre + dims;

  for (int64_t row = 0; row < row_room; row += 16) store(head.ones + row, set1(1.0f));
  if constexpr (Products::kIntegers) measure_columns(head);
  pack_keys<Products>(head);
  pack_values<Products>(head);
  const int64_t most_rows = narrow_query_rows(most_keys, kUsesTiles<Products>);
  const auto each_block = [&](auto scores_of, auto contexts_of) ENCAST_SIMD_BODY {
    for (int64_t query = query_begin; query < query_end; query += most_rows) {
      const int64_t rows = query_end - query < most_rows ? query_end - query : most_rows;
      for (int64_t row = 0; row < rows; row += 16) {
        pack_queries<Products>(head, query, row, rows - row < 16 ? rows - row : 16);
      }
      for (int64_t begin = 0; begin < len; begin += kKeyBlock) {
        const int64_t end = len - begin < kKeyBlock ? len : begin + kKeyBlock;
        const bool first = begin == 0, last = end == len;
        scores_of(query, rows, begin, end);
        if (args.reach > 0) hide_far_rows(head, query, rows, begin, end, args.reach);
        for (int64_t row = 0; row < rows; row += 16) {
          const int64_t count = rows - row < 16 ? rows - row : 16;
          if (head.exact) {
            power_rows<Products, true>(head, row, count, end - begin, first, last);
          } else {
            power_rows<Products, false>(head, row, count, end - begin, first, last);
          }
        }
        contexts_of(query, rows, begin, end, first, last);
      }
    }
  };
  if constexpr (kUsesTiles<Products>) {
    auto tiles = tiles_of<Products>();
    each_block([&](auto... block) ENCAST_SIMD_BODY { tile_score_block(tiles, head, block...); },
               [&](auto... block) ENCAST_SIMD_BODY { tile_context_block(tiles, head, block...); });
    // Tile registers left in use would make the kernel save 8 KB at every context switch.
    tiles.release();
  } else {
    each_block([&](auto... block) ENCAST_SIMD_BODY { narrow_score_block<Products>(head, block...); },
               [&](auto... block) ENCAST_SIMD_BODY { narrow_context_block<Products>(head, block...); });
  }
}

template <class Products>
ENCAST_SIMD void narrow_attention(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                                  int64_t query_end, void* scratch) {
  each_span(args, seq, query_begin, query_end,
            [&](const Span& span) ENCAST_SIMD_BODY { narrow_span<Products>(args, span, head, scratch); });
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
