#pragma once
#include "kernels/attention/attention.h"
#include "kernels/attention/scratch.h"
#include "kernels/attention/tiles.h"
#include "simd/lanes.h"
#include "simd/transpose.h"
#include "simd/vec.h"

// What tables of distances add to scores (class f32). Products with the vectors of consecutive distances are
// tiles as those with keys are. A query's row of them, begun at another place for each query, is what it adds
// to the scores of consecutive keys. A key's row is that for consecutive queries: sixteen keys by sixteen
// queries turn through the registers.
//
//                distances                       keys
//   query 0    . . [a b c d e f]      query 0   a b c d e f
//   query 1    . [g h i j k l] .      query 1   g h i j k l
//   query 2    [m n o p q r] . .      query 2   m n o p q r
//
// Every product is one chain of fused multiply-adds over head_dim, in order, and the two are added once, so
// that neither tiles nor blocks are seen in the bits.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// out = rows of a by 16 * vectors columns of a table from `blocks` on.
template <int rows, int vectors>
ENCAST_SIMD_TILE void distance_tile(const float* a, int64_t a_stride, const float* blocks, int64_t head_dim,
                                    float* out, int64_t out_stride) {
  F32x16 sum[rows][vectors];
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) sum[i][v] = set1(0.0f);
  }
  const int64_t block = 16 * head_dim;
  for (int64_t p = 0; p < head_dim; ++p) {
    F32x16 columns[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) columns[v] = load(blocks + v * block + 16 * p);
#pragma GCC unroll 6
    for (int i = 0; i < rows; ++i) {
      const F32x16 row = set1(a[i * a_stride + p]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) sum[i][v] = fma(row, columns[v], sum[i][v]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(out + i * out_stride + 16 * v, sum[i][v]);
  }
}

// Products of `rows` rows of a with `count` blocks of a table.
template <int kRows, int kVectors>
ENCAST_SIMD void distance_products(const float* a, int64_t a_stride, int64_t rows, const float* blocks,
                                   int64_t count, int64_t head_dim, float* out, int64_t out_stride) {
  for (int64_t block = 0; block < count; block += kVectors) {
    for (int64_t row = 0; row < rows; row += kRows) {
      with_count<kRows>(rows - row, [&](auto r) ENCAST_SIMD_BODY {
        with_count<kVectors>(count - block, [&](auto v) ENCAST_SIMD_BODY {
          distance_tile<r.value, v.value>(a + row * a_stride, a_stride, blocks + block * 16 * head_dim,
                                          head_dim, out + row * out_stride + 16 * block, out_stride);
        });
      });
    }
  }
}

// Tables of one head, and the scratch that they need.
struct Distances {
  const float* of_keys;     // or null
  const float* of_queries;  // or null
  int64_t origin;
  float* products;
  float* keys;
};

// A range of columns in whole blocks.
struct Columns {
  int64_t first, blocks;
};
ENCAST_SIMD Columns whole_blocks(int64_t low, int64_t high) {
  return {low / 16 * 16, high / 16 + 1 - low / 16};
}

// scores = queries by the vectors of their distances to all keys, `rows` queries from `query` on. What lies
// behind the last key is no number of any meaning.
template <int kRows, int kVectors>
ENCAST_SIMD_TILE void begin_scores(const Distances& with, const float* queries, int64_t padded_dim,
                                   int64_t head_dim, int64_t query, int64_t rows, int64_t len, float* scores,
                                   int64_t stride) {
  for (int64_t row = 0; row < rows; row += kDistanceRows) {
    const int64_t count = rows - row < kDistanceRows ? rows - row : kDistanceRows, first = query + row;
    const Columns columns = whole_blocks(with.origin - (first + count - 1), with.origin + len - 1 - first);
    const int64_t width = 16 * columns.blocks;
    if (with.of_keys != nullptr) {
      distance_products<kRows, kVectors>(queries + row * padded_dim, padded_dim, count,
                                         with.of_keys + columns.first * head_dim, columns.blocks, head_dim,
                                         with.products, width);
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* from = with.products + i * width + with.origin - (first + i) - columns.first;
      float* to = scores + (row + i) * stride;
      for (int64_t key = 0; key < len; key += 16) {
        store(to + key, with.of_keys == nullptr ? set1(0.0f) : load(from + key));
      }
    }
  }
}

// scores += keys by the vectors of their distances to `rows` queries from `query` on. `key_rows`: the first
// key's columns of this head, `key_stride` from one key to the next.
template <int kRows, int kVectors>
ENCAST_SIMD_TILE void add_to_scores(const Distances& with, const float* key_rows, int64_t key_stride,
                                    int64_t padded_dim, int64_t head_dim, int64_t query, int64_t rows,
                                    int64_t len, float* scores, int64_t stride) {
  for (int64_t key = 0; key < len; key += 16) {
    const int64_t keys = len - key < 16 ? len - key : 16;
    for (int64_t j = 0; j < keys; ++j) {
      const float* row = key_rows + (key + j) * key_stride;
      int64_t dim = 0;
      for (; dim + 16 <= head_dim; dim += 16) store(with.keys + j * padded_dim + dim, load(row + dim));
      if (dim < head_dim) store(with.keys + j * padded_dim + dim, load_partial(row + dim, head_dim - dim));
    }
    const Columns columns =
        whole_blocks(with.origin + query - (key + 15), with.origin + query + rows - 1 - key);
    const int64_t width = 16 * columns.blocks;
    distance_products<kRows, kVectors>(with.keys, padded_dim, keys,
                                       with.of_queries + columns.first * head_dim, columns.blocks, head_dim,
                                       with.products, width);
    for (int64_t row = 0; row < rows; row += 16) {
      F32x16 block[16];
      for (int64_t j = 0; j < 16; ++j) {
        block[j] =
            j < keys ? load(with.products + j * width + with.origin + query + row - (key + j) - columns.first)
                     : set1(0.0f);
      }
      transpose(block);
      for (int64_t i = 0; i < 16 && row + i < rows; ++i) {
        float* to = scores + (row + i) * stride + key;
        store(to, load(to) + block[i]);
      }
    }
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
