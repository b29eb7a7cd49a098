#pragma once
#include "kernels/attention/attention.h"
#include "kernels/attention/scratch.h"
#include "kernels/attention/tiles.h"
#include "simd/codes.h"
#include "simd/lanes.h"
#include "simd/math.h"
#include "simd/transpose.h"

// Queries, keys and values of a head to the codes that its products are made of, see narrow_impl.h: the range
// of every column, scales, and the order in which the tiles read.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

constexpr int64_t kPrefetchTokens = 8;
constexpr float kCodeLevels = 127.0f;

// Products of tiles bring Tiles, see narrow_tiles.h.
template <class Products>
constexpr bool kUsesTiles = requires { typename Products::Tiles; };

// What one call works on; parts of the scratch are drawn in scratch.h.
struct NarrowHead {
  const float* q;  // row 0 of the sequence, columns of this head; likewise k and v
  const float* k;
  const float* v;
  int64_t stride;
  const float* bias;  // column of key - query = 0, or null
  float scale, unit;  // of scores; unit makes them exponents of 2, or of e for exact powers
  bool exact;
  float* out;
  int64_t out_stride;
  int64_t query_begin;
  int64_t len, head_dim, dims;  // dims: head_dim rounded up to 16
  uint8_t* keys;
  int64_t panel_bytes;
  int32_t* corrections;
  uint8_t* values;
  uint8_t* queries;
  int64_t query_bytes;
  float* scores;
  int64_t score_stride;
  uint8_t* powers;
  int64_t power_bytes;
  float* context;
  float* lanes;
  float *factors, *tops, *shifts, *sums, *decays, *inverses, *ones;  // [rows]
  float *key_centre, *key_inverse, *key_scale;                       // [dims]
  float *value_centre, *value_scale;
};

// Sixteen dimensions from `dim` on of a row; what lies behind the last one is 0.
ENCAST_SIMD F32x16 load_dims(const NarrowHead& head, const float* row, int64_t dim) {
  const int64_t left = head.head_dim - dim;
  return left >= 16 ? load(row + dim) : left > 0 ? load_partial(row + dim, left) : set1(0.0f);
}

// For rows that lie far apart: the next use is some microseconds away.
ENCAST_SIMD void prefetch_dims(const NarrowHead& head, const float* row) {
  for (int64_t dim = 0; dim < head.head_dim; dim += 16) __builtin_prefetch(row + dim, 0, 2);
}

// Lane i: the sum, or the largest, of the lanes of vector i, folded as reductions are.
ENCAST_SIMD F32x16 add_lanes(F32x16 (&rows)[16]) {
  transpose(rows);
#pragma GCC unroll 4
  for (int width = 8; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) rows[i] = rows[i] + rows[i + width];
  }
  return rows[0];
}
ENCAST_SIMD F32x16 max_lanes(F32x16 (&rows)[16]) {
  transpose(rows);
#pragma GCC unroll 4
  for (int width = 8; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) rows[i] = max(rows[i], rows[i + width]);
  }
  return rows[0];
}

// The reciprocal of a scale; a column or row so small that it overflows counts as zeros.
ENCAST_SIMD F32x16 reciprocal_or_zero(F32x16 levels, F32x16 extent) {
  const F32x16 reciprocal = levels / extent;
  return select(less(reciprocal, set1(__builtin_inff())), reciprocal,
                select(is_nan(extent), extent, set1(0.0f)));
}

// Smallest, largest and sum of `vectors` times sixteen columns over the tokens. Smallest and largest pass
// over a NaN; the sum keeps it.
template <int vectors>
ENCAST_SIMD_TILE void column_range(const float* x, int64_t stride, int64_t len, int64_t last_lanes,
                                   F32x16 (&low)[4], F32x16 (&high)[4], F32x16 (&sum)[4]) {
  const auto get = [&](const float* row, int v) ENCAST_SIMD_BODY {
    return v + 1 < vectors || last_lanes == 16 ? load(row + 16 * v) : load_partial(row + 16 * v, last_lanes);
  };
  F32x16 least[vectors], most[vectors], total[vectors];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) least[v] = most[v] = total[v] = get(x, v);
  for (int64_t token = 1; token < len; ++token) {
    const float* row = x + token * stride;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      __builtin_prefetch(row + kPrefetchTokens * stride + 16 * v);
      const F32x16 value = get(row, v);
      least[v] = min(value, least[v]);
      most[v] = max(value, most[v]);
      total[v] = total[v] + value;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    low[v] = least[v];
    high[v] = most[v];
    sum[v] = total[v];
  }
}

// Keys: centred between the extremes of a column, which softmax cannot see. Values: around the column's mean,
// so that powers too small for a code still count with the mean.
static inline void measure_columns(const NarrowHead& head) {
  const F32x16 levels = set1(kCodeLevels), half = set1(0.5f);
  for (int64_t dim = 0; dim < head.dims; dim += 64) {
    const int64_t vectors = head.dims - dim < 64 ? (head.dims - dim) / 16 : 4;
    const int64_t tail = head.head_dim - dim - 16 * (vectors - 1);
    const int64_t last_lanes = tail < 16 ? tail : 16;
    F32x16 low[4], high[4], sum[4];
    const auto measure = [&](const float* x) ENCAST_SIMD_BODY {
      with_count<4>(vectors, [&](auto v) ENCAST_SIMD_BODY {
        column_range<v.value>(x + dim, head.stride, head.len, last_lanes, low, high, sum);
      });
    };
    measure(head.k);
    for (int64_t v = 0; v < vectors; ++v) {
      // 0, or NaN where the column has one or an infinity.
      const F32x16 poison = sum[v] - sum[v];
      const F32x16 extent = (high[v] - low[v]) * half + poison;
      const F32x16 inverse = reciprocal_or_zero(levels, extent);
      store(head.key_centre + dim + 16 * v, (high[v] + low[v]) * half);
      store(head.key_inverse + dim + 16 * v, inverse);
      store(head.key_scale + dim + 16 * v,
            select(less_equal(inverse, set1(0.0f)), set1(0.0f), extent / levels));
    }
    measure(head.v);
    for (int64_t v = 0; v < vectors; ++v) {
      const F32x16 mean = sum[v] / set1(static_cast<float>(head.len));
      store(head.value_centre + dim + 16 * v, mean);
      store(head.value_scale + dim + 16 * v, max(high[v] - mean, mean - low[v]) / levels + (sum[v] - sum[v]));
    }
  }
}

// The codes of 16 x kGroup dimensions of a key, from `dim` on, in order.
template <class Products>
ENCAST_SIMD I32x16 key_codes(const NarrowHead& head, const float* row, int64_t dim) {
  if constexpr (Products::kIntegers) {
    I32x16 codes[Products::kGroup];
#pragma GCC unroll 4
    for (int j = 0; j < Products::kGroup; ++j) {
      const int64_t at = dim + 16 * j;
      codes[j] = set1(0);
      if (at >= head.dims) continue;
      codes[j] =
          to_i32((load_dims(head, row, at) - load(head.key_centre + at)) * load(head.key_inverse + at));
    }
    return pack_codes<true>(codes);
  } else {
    return Products::round_pair(load_dims(head, row, dim), load_dims(head, row, dim + 16));
  }
}

// Keys to panels: rows of codes, sixteen keys at a time transposed by groups through the registers.
template <class Products>
ENCAST_SIMD_TILE void pack_keys(const NarrowHead& head) {
  constexpr int kGroup = Products::kGroup;
  const int64_t groups = head.panel_bytes / (kKeyPanel * 4);
  for (int64_t key = 0; key < head.len; key += 16) {
    uint8_t* panel = head.keys + key / kKeyPanel * head.panel_bytes + key % kKeyPanel * 4;
    typename Products::Sum offset = Products::zero();
    for (int64_t group = 0; group < groups; group += 16) {
      F32x16 block[16];
      for (int64_t i = 0; i < 16; ++i) {
        if (group == 0) prefetch_dims(head, head.q + (head.query_begin + key + i) * head.stride);
        block[i] =
            key + i >= head.len
                ? set1(0.0f)
                : from_bits(key_codes<Products>(head, head.k + (key + i) * head.stride, group * kGroup));
      }
      transpose(block);
      const int64_t count = groups - group < 16 ? groups - group : 16;
      for (int64_t i = 0; i < count; ++i) {
        uint8_t* to = panel + (group + i) * kKeyPanel * 4;
        store(reinterpret_cast<float*>(to), block[i]);
        if constexpr (Products::kOffset != 0)
          offset = Products::add(offset, Products::offset_row(), Products::columns(to));
      }
    }
    if constexpr (Products::kOffset != 0) store_i32(head.corrections + key, set1(0) - offset);
  }
}

// Values by groups of keys.
template <class Products>
ENCAST_SIMD_TILE void pack_values(const NarrowHead& head) {
  constexpr int kGroup = Products::kGroup;
  for (int64_t dim = 0; dim < head.dims; dim += 16) {
    F32x16 centre = set1(0.0f), inverse = set1(1.0f);
    if constexpr (Products::kIntegers) {
      centre = load(head.value_centre + dim);
      const F32x16 scale = load(head.value_scale + dim);
      inverse = reciprocal_or_zero(set1(1.0f), scale);
    }
    uint8_t* to = head.values + dim * 4;
    for (int64_t key = 0; key < head.len; key += kGroup) {
      F32x16 value[kGroup];
#pragma GCC unroll 4
      for (int j = 0; j < kGroup; ++j) {
        value[j] = centre;
        if (key + j < head.len) value[j] = load_dims(head, head.v + (key + j) * head.stride, dim);
      }
      I32x16 groups;
      if constexpr (Products::kIntegers) {
        I32x16 codes[kGroup];
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; ++j) codes[j] = to_i32((value[j] - centre) * inverse);
        groups = interleave_codes(codes);
      } else {
        groups = Products::interleave_pair(Products::round_pair(value[0], value[1]));
      }
      store_i32(reinterpret_cast<int32_t*>(to), groups);
      to += head.dims * 4;
    }
    if constexpr (kUsesTiles<Products>) {
      // The rest of the last step: zero powers times what is no number would be none.
      for (int64_t group = (head.len + kGroup - 1) / kGroup; group % 16 != 0; ++group) {
        store_i32(reinterpret_cast<int32_t*>(to), set1(0));
        to += head.dims * 4;
      }
    }
  }
}

// Codes and factors of sixteen queries, of which `count` exist.
template <class Products>
ENCAST_SIMD_TILE void pack_queries(const NarrowHead& head, int64_t query, int64_t row, int64_t count) {
  constexpr int kGroup = Products::kGroup;
  const F32x16 exponent = set1(head.scale * head.unit);
  float inverse_lanes[16];
  if constexpr (Products::kIntegers) {
    F32x16 largest[16];
    for (int64_t i = 0; i < 16; ++i) {
      const float* q = head.q + (query + row + i) * head.stride;
      I32x16 bits_of_largest = set1(0);
      if (i < count) {
        for (int64_t dim = 0; dim < head.dims; dim += 16) {
          const F32x16 value = load_dims(head, q, dim) * load(head.key_scale + dim);
          // Of magnitudes the order of values is the order of patterns, and a NaN beats all.
          bits_of_largest = max(bits_of_largest, bits(abs(value)));
        }
      }
      largest[i] = from_bits(bits_of_largest);
    }
    transpose(largest);
#pragma GCC unroll 16
    for (int i = 1; i < 16; ++i) largest[0] = from_bits(max(bits(largest[0]), bits(largest[i])));
    const F32x16 inverse = reciprocal_or_zero(set1(kCodeLevels), largest[0]);
    store(inverse_lanes, inverse);
    // Never 0, which times the minus infinity of a missing key would be NaN.
    store(head.factors + row, max(set1(0x1p-126f), largest[0] / set1(kCodeLevels) * exponent));
  } else {
    store(head.factors + row, max(set1(0x1p-126f), exponent));
  }
  for (int64_t i = 0; i < count; ++i) {
    const float* q = head.q + (query + row + i) * head.stride;
    uint8_t* to = head.queries + (row + i) * head.query_bytes;
    for (int64_t dim = 0; dim < head.dims; dim += 16 * kGroup) {
      I32x16 packed;
      if constexpr (Products::kIntegers) {
        I32x16 codes[kGroup];
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; ++j) {
          const int64_t at = dim + 16 * j;
          codes[j] = set1(0);
          if (at >= head.dims) continue;
          const F32x16 value = load_dims(head, q, at) * load(head.key_scale + at);
          codes[j] = to_i32(value * set1(inverse_lanes[i])) + set1(Products::kOffset);
        }
        packed = pack_codes<Products::kSignedQueries>(codes);
      } else {
        packed = Products::round_pair(load_dims(head, q, dim), load_dims(head, q, dim + 16));
      }
      store_i32(reinterpret_cast<int32_t*>(to + dim * (4 / kGroup)), packed);
    }
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
