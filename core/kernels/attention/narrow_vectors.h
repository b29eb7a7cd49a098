#pragma once
#include "kernels/attention/narrow_pack.h"

// Scores and contexts of class s8 and bf16_dp in vector registers, and what tiles share of their ends.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

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

// A score in units of the query's factor, with a bias in units of the exponent; minus infinity behind the
// last key. `first`: of the sixteen keys.
ENCAST_SIMD F32x16 finish_score(const NarrowHead& head, int64_t query, int64_t row, int64_t first,
                                F32x16 score) {
  const int64_t valid = head.len - first;
  if (head.bias != nullptr) {
    const float* bias = head.bias + (first - (query + row));
    const F32x16 added = valid >= 16 ? load(bias) : load_partial(bias, valid);
    score = fma(score, set1(head.factors[row]), added * set1(head.unit));
  }
  return valid < 16 ? select(first_lanes(valid), score, set1(-__builtin_inff())) : score;
}

// Sixteen columns of a context from `col` on, over one block of keys.
template <bool kIntegers>
ENCAST_SIMD void finish_context(const NarrowHead& head, int64_t query, int64_t row, int64_t col, bool first,
                                bool last, F32x16 value) {
  float* context = head.context + row * head.dims + col;
  if (!first) value = fma(load(context), set1(head.decays[row]), value);
  if (!last) {
    store(context, value);
    return;
  }
  value = value * set1(head.inverses[row]);
  if constexpr (kIntegers) value = fma(value, load(head.value_scale + col), load(head.value_centre + col));
  float* out = head.out + (query + row) * head.out_stride + col;
  const int64_t left = head.head_dim - col;
  if (left >= 16) {
    store(out, value);
  } else {
    store_partial(out, left, value);
  }
}

// Scores of `rows` queries from row `row` of the block on against `vectors` times 16 keys from `key` on, and
// their largest so far.
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
  // What stores might change is loaded once, not again for every score.
  float* const lanes = head.lanes + row * 16;
  const int64_t stride = head.score_stride, last_valid = head.len - key - 16 * (vectors - 1);
  const Mask16 last_keys = first_lanes(last_valid < 16 ? last_valid : 16);
  const auto store_all = [&](auto score_of) ENCAST_SIMD_BODY {
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
      F32x16 top = load(lanes + i * 16);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const F32x16 score = score_of(i, v, as_f32(sum[i][v]));
        top = max(score, top);
        store(scores + i * stride + 16 * v, score);
      }
      store(lanes + i * 16, top);
    }
  };
  if (head.bias == nullptr) {
    store_all([&](int, int v, F32x16 score) ENCAST_SIMD_BODY {
      return v + 1 < vectors ? score : select(last_keys, score, set1(-__builtin_inff()));
    });
  } else {
    store_all([&](int i, int v, F32x16 score)
                  ENCAST_SIMD_BODY { return finish_score(head, query, row + i, key + 16 * v, score); });
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
  if (first && last && col + 16 * vectors <= head.head_dim) {
    // As finish_context, for what most contexts are: all keys in one block, and whole vectors.
    const int64_t stride = head.out_stride;
    float* const out = head.out + (query + row) * stride + col;
    const float* const inverses = head.inverses + row;
    F32x16 scale[vectors], centre[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      scale[v] = load(head.value_scale + col + 16 * v);
      centre[v] = load(head.value_centre + col + 16 * v);
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
      const F32x16 inverse = set1(inverses[i]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        F32x16 value = as_f32(sum[i][v]) * inverse;
        if constexpr (Products::kIntegers) value = fma(value, scale[v], centre[v]);
        store(out + i * stride + 16 * v, value);
      }
    }
    return;
  }
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      finish_context<Products::kIntegers>(head, query, row + i, col + 16 * v, first, last, as_f32(sum[i][v]));
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

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
