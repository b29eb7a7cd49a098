#pragma once
#include "kernels/attention/narrow_pack.h"

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
template <bool kIntegers>
ENCAST_SIMD F32x16 power_of_2(F32x16 x) {
  constexpr float kShort[] = {1.0f, 0x1.62e12cp-1f, 0x1.ec0378p-3f, 0x1.c9fc5ap-5f, 0x1.3a02e0p-7f};
  constexpr float kLong[] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9bcp-3f,
                             0x1.c6b752p-5f, 0x1.3cea90p-7f, 0x1.5bba24p-10f};
  x = max(set1(-100.0f), x);
  const F32x16 n = round(x), f = x - n;
  if constexpr (kIntegers) return times_power_of_2(horner(f, kShort), n);
  return times_power_of_2(horner(f, kLong), n);
}
template <bool kIntegers, bool exact>
ENCAST_SIMD F32x16 power(F32x16 x) {
  if constexpr (exact) return exp_exact(max(set1(-100.0f), x));
  return power_of_2<kIntegers>(x);
}

// sum[i][v] += a row of groups times columns 16v to 16v+15, over `groups` groups in order.
template <class Products, int rows, int vectors>
ENCAST_SIMD void multiply_groups(typename Products::Sum (&sum)[rows][vectors], const uint8_t* a,
                                 int64_t a_bytes, const uint8_t* b, int64_t b_bytes, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g) {
    decltype(Products::columns(b)) columns[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) columns[v] = Products::columns(b + 64 * v);
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
      const auto row = Products::row(a + i * a_bytes);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[i][v] = Products::add(sum[i][v], row, columns[v]);
    }
    a += 4;
    b += b_bytes;
  }
}

ENCAST_SIMD F32x16 as_f32(I32x16 sum) { return to_f32(sum); }
ENCAST_SIMD F32x16 as_f32(F32x16 sum) { return sum; }

// Scores of `rows` queries from row `row` of the block on against `vectors` times 16 keys from `key` on, in
// units of the query's factor (with a bias: in units of the exponent), and their largest so far.
template <class Products, int rows, int vectors>
ENCAST_SIMD_TILE void narrow_scores(const NarrowHead& head, int64_t query, int64_t row, int64_t key,
                                    float* scores) {
  typename Products::Sum sum[rows][vectors];
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      if constexpr (Products::kOffset != 0) {
        sum[i][v] = load_i32(head.corrections + key + 16 * v);
      } else {
        sum[i][v] = Products::zero();
      }
    }
  }
  const uint8_t* panel = head.keys + key / kKeyPanel * head.panel_bytes + key % kKeyPanel * 4;
  multiply_groups<Products>(sum, head.queries + row * head.query_bytes, head.query_bytes, panel,
                            kKeyPanel * 4, (head.head_dim + Products::kGroup - 1) / Products::kGroup);
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
    F32x16 top = load(head.lanes + (row + i) * 16);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const int64_t first = key + 16 * v, valid = head.len - first;
      F32x16 score = as_f32(sum[i][v]);
      if (head.bias != nullptr) {
        const float* bias = head.bias + (first - (query + row + i));
        const F32x16 added = valid >= 16 ? load(bias) : load_partial(bias, valid);
        score = fma(score, set1(head.factors[row + i]), added * set1(head.unit));
      }
      if (valid < 16) score = select(first_lanes(valid), score, set1(-__builtin_inff()));
      top = max(score, top);
      store(scores + i * head.score_stride + 16 * v, score);
    }
    store(head.lanes + (row + i) * 16, top);
  }
}

// Scores of a block of queries against the keys [key, end). A panel of keys stays in L1 while all tiles pass.
template <class Products>
ENCAST_SIMD void narrow_score_block(const NarrowHead& head, int64_t query, int64_t rows, int64_t begin,
                                    int64_t end) {
  for (int64_t row = 0; row < rows; ++row) store(head.lanes + row * 16, set1(-__builtin_inff()));
  for (int64_t key = begin; key < end; key += 16 * Products::kVectors) {
    const int64_t vectors = (end - key + 15) / 16;
    for (int64_t row = 0; row < rows; row += Products::kRows) {
      float* scores = head.scores + row * head.score_stride + (key - begin);
      with_count<Products::kRows>(rows - row, [&](auto r) ENCAST_SIMD_BODY {
        with_count<Products::kVectors>(vectors, [&](auto v) ENCAST_SIMD_BODY {
          narrow_scores<Products, r.value, v.value>(head, query, row, key, scores);
        });
      });
    }
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
  const auto power_at = [&](int64_t key) ENCAST_SIMD_BODY {
    return power<Products::kIntegers, exact>(fma(load(scores + key), set1(factor), set1(shift)));
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
  int64_t key = 0;
  for (; key + 64 <= keys; key += 64) {
    F32x16 powers[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) powers[i] = power_at(key + 16 * i);
    put(powers, key);
  }
  if (key < keys) {
    // What lies behind the last key of its vector is minus infinity.
    F32x16 powers[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) powers[i] = key + 16 * i < keys ? power_at(key + 16 * i) : set1(0.0f);
    put(powers, key);
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
    decay = power<Products::kIntegers, exact>((before - top) * load(factors + row));
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

// Context of `rows` queries, `vectors` times 16 columns from `col` on, over the keys of one block.
template <class Products, int rows, int vectors>
ENCAST_SIMD_TILE void narrow_context(const NarrowHead& head, int64_t query, int64_t row, int64_t col,
                                     int64_t begin, int64_t groups, bool first, bool last) {
  typename Products::Sum sum[rows][vectors];
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[i][v] = Products::zero();
  }
  multiply_groups<Products>(sum, head.powers + row * head.power_bytes, head.power_bytes,
                            head.values + (begin / Products::kGroup * head.dims + col) * 4, head.dims * 4,
                            groups);
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
    float* context = head.context + (row + i) * head.dims + col;
    float* out = head.out + (query + row + i) * head.out_stride + col;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      F32x16 value = as_f32(sum[i][v]);
      if (!first) value = fma(load(context + 16 * v), set1(head.decays[row + i]), value);
      if (!last) {
        store(context + 16 * v, value);
        continue;
      }
      value = value * set1(head.inverses[row + i]);
      if constexpr (Products::kIntegers) {
        value = fma(value, load(head.value_scale + col + 16 * v), load(head.value_centre + col + 16 * v));
      }
      const int64_t left = head.head_dim - col - 16 * v;
      if (left >= 16) {
        store(out + 16 * v, value);
      } else {
        store_partial(out + 16 * v, left, value);
      }
    }
  }
}

template <class Products>
ENCAST_SIMD void narrow_context_block(const NarrowHead& head, int64_t query, int64_t rows, int64_t begin,
                                      int64_t end, bool first, bool last) {
  const int64_t groups = (end - begin + Products::kGroup - 1) / Products::kGroup;
  for (int64_t col = 0; col < head.dims; col += 16 * Products::kVectors) {
    const int64_t vectors = (head.dims - col) / 16;
    for (int64_t row = 0; row < rows; row += Products::kRows) {
      with_count<Products::kRows>(rows - row, [&](auto r) ENCAST_SIMD_BODY {
        with_count<Products::kVectors>(vectors, [&](auto v) ENCAST_SIMD_BODY {
          narrow_context<Products, r.value, v.value>(head, query, row, col, begin, groups, first, last);
        });
      });
    }
  }
}

template <class Products>
ENCAST_SIMD void narrow_attention(const AttentionArgs& args, int64_t seq, int64_t head_index,
                                  int64_t query_begin, int64_t query_end, void* scratch) {
  if (query_begin >= query_end) return;
  const int64_t first_row = args.cu_seqlens[seq], hidden = static_cast<int64_t>(args.heads) * args.head_dim;
  const float* q = args.qkv + first_row * args.qkv_stride + head_index * args.head_dim;
  const int64_t len = args.cu_seqlens[seq + 1] - first_row;
  const NarrowParts parts = narrow_parts(len, args.head_dim, Products::kGroup);
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
  head.query_bytes = parts.queries / kMaxQueryRows;
  head.scores = floats(parts.scores);
  head.score_stride = parts.scores / kMaxQueryRows / 4;
  head.powers = take(parts.powers);
  head.power_bytes = parts.powers / kMaxQueryRows;
  head.context = floats(parts.context);
  head.lanes = floats(parts.lanes);
  head.factors = floats(parts.rows);
  head.tops = head.factors + kMaxQueryRows;
  head.shifts = head.tops + kMaxQueryRows;
  head.sums = head.shifts + kMaxQueryRows;
  head.decays = head.sums + kMaxQueryRows;
  head.inverses = head.decays + kMaxQueryRows;
  head.ones = head.inverses + kMaxQueryRows;
  head.key_centre = floats(parts.channels);
  head.key_inverse = head.key_centre + dims;
  head.key_scale = head.key_inverse + dims;
  head.value_centre = head.key_scale + dims;
  head.value_scale = head.value_centre + dims;

  for (int64_t row = 0; row < kMaxQueryRows; row += 16) store(head.ones + row, set1(1.0f));
  if constexpr (Products::kIntegers) measure_columns(head);
  pack_keys<Products>(head);
  pack_values<Products>(head);
  for (int64_t query = query_begin; query < query_end; query += kMaxQueryRows) {
    const int64_t rows = query_end - query < kMaxQueryRows ? query_end - query : kMaxQueryRows;
    for (int64_t row = 0; row < rows; row += 16) {
      pack_queries<Products>(head, query, row, rows - row < 16 ? rows - row : 16);
    }
    for (int64_t begin = 0; begin < len; begin += kKeyBlock) {
      const int64_t end = len - begin < kKeyBlock ? len : begin + kKeyBlock;
      const bool first = begin == 0, last = end == len;
      narrow_score_block<Products>(head, query, rows, begin, end);
      for (int64_t row = 0; row < rows; row += 16) {
        const int64_t count = rows - row < 16 ? rows - row : 16;
        if (head.exact) {
          power_rows<Products, true>(head, row, count, end - begin, first, last);
        } else {
          power_rows<Products, false>(head, row, count, end - begin, first, last);
        }
      }
      narrow_context_block<Products>(head, query, rows, begin, end, first, last);
    }
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
