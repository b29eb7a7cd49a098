#pragma once
#include "kernels/attention/attention.h"
#include "kernels/attention/distances.h"
#include "kernels/attention/local.h"
#include "kernels/attention/scratch.h"
#include "kernels/attention/spans.h"
#include "kernels/attention/tiles.h"
#include "simd/lanes.h"
#include "simd/math.h"
#include "simd/transpose.h"

// Classes f32 and bf16_fma, once for every level; README.md has the drawing. bf16_fma rounds its operands to
// bf16, which it keeps in f32, and then computes as f32 does: products of bf16 are exact there. A level
// chooses the register tile: kRows queries by kVectors vectors of sixteen columns. Every output is one chain
// of fused multiply-adds over head_dim (scores) or over the keys (context), in order, so neither the tile nor
// the query block is seen in the bits.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// sum[i][v] += a[i][0 ... k-1] times columns 16v to 16v+15 of b[0 ... k-1].
template <int rows, int vectors>
ENCAST_SIMD void multiply_tile(F32x16 (&sum)[rows][vectors], const float* a, int64_t a_stride, const float* b,
                               int64_t b_stride, int64_t k) {
  for (int64_t p = 0; p < k; ++p) {
    F32x16 columns[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) columns[v] = load(b + p * b_stride + 16 * v);
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
      const F32x16 row = set1(a[i * a_stride + p]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[i][v] = fma(row, columns[v], sum[i][v]);
    }
  }
}

// What one call works on.
struct Head {
  const float* q;  // row 0 of the sequence, columns of this head; likewise k and v
  const float* k;
  const float* v;
  int64_t stride;
  const float* bias;  // column of key - query = 0, or null
  float scale;
  bool exact;
  float* out;
  int64_t out_stride;
  int64_t len, head_dim;
  int64_t padded_len, padded_dim;
  float* keys;  // parts of the scratch, see scratch.h
  float* values;
  float* scores;
  float* context;
  float* queries;
  Distances distances;
  bool begun;  // scores hold what tables of distances give
};

// What class bf16_fma makes of an operand, and f32 does not.
template <bool kRounded>
ENCAST_SIMD F32x16 operand(F32x16 x) {
  if constexpr (kRounded) return from_bits(shift_left<16>(to_bf16(x)));
  return x;
}

// Keys to panels: 16 keys by 16 dimensions at a time through the registers.
template <bool kRounded>
ENCAST_SIMD_TILE void pack_keys(const Head& head) {
  for (int64_t key = 0; key < head.len; key += 16) {
    float* panel = head.keys + key / kKeyPanel * kKeyPanel * head.head_dim + key % kKeyPanel;
    for (int64_t dim = 0; dim < head.head_dim; dim += 16) {
      const int64_t dims = head.head_dim - dim < 16 ? head.head_dim - dim : 16;
      F32x16 block[16];
      for (int64_t i = 0; i < 16; ++i) {
        const float* row = head.k + (key + i) * head.stride + dim;
        block[i] = key + i >= head.len ? set1(0.0f) : dims == 16 ? load(row) : load_partial(row, dims);
      }
      transpose(block);
      for (int64_t i = 0; i < dims; ++i) store(panel + (dim + i) * kKeyPanel, operand<kRounded>(block[i]));
    }
  }
}

// Values, and a block's queries, side by side: in place, rows of 3 * hidden floats would fall into few cache
// sets and many pages.
template <bool kRounded>
ENCAST_SIMD_TILE void pack_rows(const Head& head, const float* rows, int64_t count, float* packed) {
  for (int64_t i = 0; i < count; ++i) {
    const float* row = rows + i * head.stride;
    int64_t dim = 0;
    for (; dim + 16 <= head.head_dim; dim += 16) store(packed + dim, operand<kRounded>(load(row + dim)));
    if (dim < head.head_dim) {
      store(packed + dim, operand<kRounded>(load_partial(row + dim, head.head_dim - dim)));
    }
    packed += head.padded_dim;
  }
}

// scale * (q k^T + what the scores hold already) + bias of `rows` queries from row `row` of the block on
// against `vectors` times 16 keys from `key` on; -infinity behind the last key.
template <int rows, int vectors>
ENCAST_SIMD_TILE void score_tile(const Head& head, int64_t query, int64_t row, int64_t key) {
  float* scores = head.scores + row * head.padded_len;
  F32x16 sum[rows][vectors];
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sum[i][v] = head.begun ? load(scores + i * head.padded_len + key + 16 * v) : set1(0.0f);
    }
  }
  const float* panel = head.keys + key / kKeyPanel * kKeyPanel * head.head_dim + key % kKeyPanel;
  multiply_tile(sum, head.queries + row * head.padded_dim, head.padded_dim, panel, kKeyPanel, head.head_dim);
  const F32x16 scale = set1(head.scale);
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const int64_t first = key + 16 * v, valid = head.len - first;
      const float* bias = head.bias == nullptr ? nullptr : head.bias + (first - (query + row + i));
      F32x16 score;
      if (valid >= 16) {
        score = bias == nullptr ? sum[i][v] * scale : fma(sum[i][v], scale, load(bias));
      } else {
        score = bias == nullptr ? sum[i][v] * scale : fma(sum[i][v], scale, load_partial(bias, valid));
        score = select(first_lanes(valid), score, set1(-__builtin_inff()));
      }
      store(scores + i * head.padded_len + first, score);
    }
  }
}

// Scores of a block of queries. A panel of keys stays in L1 while all tiles of the block pass over it.
template <int kRows, int kVectors>
ENCAST_SIMD void score_block(const Head& head, int64_t query, int64_t rows) {
  for (int64_t key = 0; key < head.len; key += 16 * kVectors) {
    const int64_t vectors = (head.len - key + 15) / 16;
    for (int64_t row = 0; row < rows; row += kRows) {
      with_count<kRows>(rows - row, [&](auto r) ENCAST_SIMD_BODY {
        with_count<kVectors>(
            vectors, [&](auto v) ENCAST_SIMD_BODY { score_tile<r.value, v.value>(head, query, row, key); });
      });
    }
  }
}

// scores = exp(scores - max), one row; returns the reciprocal of their sum. Lanes behind the last key become
// 0.
template <bool exact, bool kRounded>
ENCAST_SIMD_TILE float softmax_row(float* scores, int64_t len) {
  const int64_t padded = round_up_to(len, 16);
  F32x16 largest[kStreams], sum[kStreams];
  fill(largest, -__builtin_inff());
  fill(sum, 0.0f);
  for_columns(padded, [&](int i, int64_t col, auto)
                          ENCAST_SIMD_BODY { largest[i] = max(load(scores + col), largest[i]); });
  const F32x16 top = set1(reduce_max(largest));
  for_columns(padded, [&](int i, int64_t col, auto) ENCAST_SIMD_BODY {
    const F32x16 below = load(scores + col) - top;
    const F32x16 power = operand<kRounded>(exact ? exp_exact(below) : exp(below));
    store(scores + col, power);
    sum[i] = sum[i] + power;
  });
  return 1.0f / reduce_add(sum);
}

// Keys a pass over the values: 128 rows of 64 columns are 32 KiB, most of L1.
constexpr int64_t kKeysAPass = 128;

// Adds keys [key, end) to columns from `col` on of the context of `rows` queries; at the last key the rows
// are divided by their sums of exponentials and leave for `out`. Partial sums wait in the scratch as they
// are.
template <int rows, int vectors>
ENCAST_SIMD_TILE void context_tile(const Head& head, int64_t query, int64_t row, int64_t col, int64_t key,
                                   int64_t end, const float* inverse_sums) {
  float* context = head.context + row * head.padded_dim + col;
  F32x16 sum[rows][vectors];
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      sum[i][v] = key == 0 ? set1(0.0f) : load(context + i * head.padded_dim + 16 * v);
    }
  }
  multiply_tile(sum, head.scores + row * head.padded_len + key, head.padded_len,
                head.values + key * head.padded_dim + col, head.padded_dim, end - key);
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
    float* out = head.out + (query + row + i) * head.out_stride + col;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const int64_t left = head.head_dim - col - 16 * v;
      if (end < head.len) {
        store(context + i * head.padded_dim + 16 * v, sum[i][v]);
      } else if (left >= 16) {
        store(out + 16 * v, sum[i][v] * set1(inverse_sums[row + i]));
      } else {
        store_partial(out + 16 * v, left, sum[i][v] * set1(inverse_sums[row + i]));
      }
    }
  }
}

template <int kRows, int kVectors>
ENCAST_SIMD void context_block(const Head& head, int64_t query, int64_t rows, const float* inverse_sums) {
  for (int64_t key = 0; key < head.len; key += kKeysAPass) {
    const int64_t end = head.len - key < kKeysAPass ? head.len : key + kKeysAPass;
    for (int64_t col = 0; col < head.padded_dim; col += 16 * kVectors) {
      const int64_t vectors = (head.padded_dim - col) / 16;
      for (int64_t row = 0; row < rows; row += kRows) {
        with_count<kRows>(rows - row, [&](auto r) ENCAST_SIMD_BODY {
          with_count<kVectors>(vectors, [&](auto v) ENCAST_SIMD_BODY {
            context_tile<r.value, v.value>(head, query, row, col, key, end, inverse_sums);
          });
        });
      }
    }
  }
}

template <int kRows, int kVectors, bool kRounded>
ENCAST_SIMD void attend_span(const AttentionArgs& args, const Span& span, int64_t head_index, void* scratch) {
  const int64_t first = span.first, len = span.len;
  const int64_t hidden = static_cast<int64_t>(args.heads) * args.head_dim;
  const float* q = args.qkv + first * args.qkv_stride + head_index * args.head_dim;
  const ScratchParts parts = scratch_parts(len, args.head_dim);
  const int64_t table_floats = args.shared_tables ? 0 : head_index * args.table_columns * args.head_dim;
  const auto table = [&](const float* tables)
                         ENCAST_SIMD_BODY { return tables == nullptr ? nullptr : tables + table_floats; };
  float* keys = static_cast<float*>(scratch);
  const Head head = {
      .q = q,
      .k = q + hidden,
      .v = q + 2 * hidden,
      .stride = args.qkv_stride,
      .bias = args.bias == nullptr ? nullptr
                                   : args.bias + head_index * (2 * args.bias_len - 1) + args.bias_len - 1,
      .scale = args.scale,
      .exact = args.exact,
      .out = args.out + first * args.out_stride + head_index * args.head_dim,
      .out_stride = args.out_stride,
      .len = len,
      .head_dim = args.head_dim,
      .padded_len = round_up_to(len, kKeyPanel),
      .padded_dim = round_up_to(args.head_dim, 16),
      .keys = keys,
      .values = keys + parts.keys,
      .scores = keys + parts.keys + parts.values,
      .context = keys + parts.keys + parts.values + parts.scores,
      .queries = keys + parts.keys + parts.values + parts.scores + parts.context,
      .distances = {.of_keys = table(args.key_table),
                    .of_queries = table(args.query_table),
                    .origin = relative_origin(args.table_columns),
                    .products = keys + parts.floats(),
                    .keys = keys + parts.floats() + distance_parts(len, args.head_dim).products},
      .begun = !kRounded && (args.key_table != nullptr || args.query_table != nullptr),
  };
  pack_keys<kRounded>(head);
  pack_rows<kRounded>(head, head.v, len, head.values);
  const int64_t block = query_rows(len);
  float inverse_sums[kMaxQueryRows];
  for (int64_t query = span.query_begin; query < span.query_end; query += block) {
    const int64_t rows = span.query_end - query < block ? span.query_end - query : block;
    pack_rows<kRounded>(head, head.q + query * head.stride, rows, head.queries);
    if constexpr (!kRounded) {
      if (head.begun) {
        begin_scores<kRows, kVectors>(head.distances, head.queries, head.padded_dim, head.head_dim, query,
                                      rows, len, head.scores, head.padded_len);
      }
      if (head.distances.of_queries != nullptr) {
        add_to_scores<kRows, kVectors>(head.distances, head.k, head.stride, head.padded_dim, head.head_dim,
                                       query, rows, len, head.scores, head.padded_len);
      }
    }
    score_block<kRows, kVectors>(head, query, rows);
    for (int64_t row = 0; args.reach > 0 && row < rows; ++row) {
      hide_far(head.scores + row * head.padded_len, len, query + row - args.reach, query + row + args.reach);
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* scores = head.scores + row * head.padded_len;
      inverse_sums[row] =
          head.exact ? softmax_row<true, kRounded>(scores, len) : softmax_row<false, kRounded>(scores, len);
    }
    context_block<kRows, kVectors>(head, query, rows, inverse_sums);
  }
}

template <int kRows, int kVectors, bool kRounded>
ENCAST_SIMD void attention(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                           int64_t query_end, void* scratch) {
  each_span(args, seq, query_begin, query_end, [&](const Span& span) ENCAST_SIMD_BODY {
    attend_span<kRows, kVectors, kRounded>(args, span, head, scratch);
  });
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
