#pragma once
#include "kernels/attention/narrow_vectors.h"
#include "simd/amx.h"

// Scores and contexts of class bf16_tile in tile registers: sums of up to 48 rows times sixteen columns.
//
//               B6: sixteen columns
//   A3: rows 0-15     C0
//   A4: rows 16-31    C1
//   A5: rows 32-47    C2
//
// Queries, keys, powers and values lie as tiles want them, in whole steps of 16 groups. Rows behind the last
// one are computed from what the scratch holds there, and forgotten. Sums pass through memory to their ends.
namespace encast {
inline namespace ENCAST_SIMD_LEVEL {

// Products of tiles, which also have round_pair, interleave_pair and Tiles: Instructions of simd/amx.h.
struct TileProducts {
  static constexpr int kGroup = 2, kOffset = 0;
  static constexpr bool kIntegers = false;
  using Sum = F32x16;
  ENCAST_SIMD Sum zero() { return set1(0.0f); }
};

// The instructions, ready to multiply: a tile is 16 rows of 64 bytes.
template <class Products>
ENCAST_SIMD auto tiles_of() {
  TileConfig config;
  for (int tile = 0; tile < 7; ++tile) {
    config.rows[tile] = kTileRows;
    config.row_bytes[tile] = kTileBytes;
  }
  typename Products::Tiles tiles;
  tiles.configure(config);
  return tiles;
}

// c = a b for 16 * row_tiles rows and `columns` times sixteen columns; b(column) is where sixteen of them
// begin. Sums of a column are stored among the products of the next one, because a store waits for its sums.
template <int row_tiles, class Tiles, class B>
ENCAST_SIMD void multiply_tiles(Tiles& tiles, const uint8_t* a, int64_t a_bytes, B b, int64_t b_bytes,
                                int64_t columns, int64_t steps, float* c, int64_t c_stride) {
  const auto each_row_tile = [](auto body) ENCAST_SIMD_BODY {
    body(Count<0>{});
    if constexpr (row_tiles > 1) body(Count<1>{});
    if constexpr (row_tiles > 2) body(Count<2>{});
  };
  const auto store_sums = [&](auto tile, int64_t column) ENCAST_SIMD_BODY {
    tiles.template store<tile.value>(c + tile.value * kTileRows * c_stride + kTileColumns * column,
                                     c_stride * 4);
  };
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t step = 0; step < steps; ++step) {
      tiles.template load<6>(b(column) + step * kTileGroups * b_bytes, b_bytes);
      each_row_tile([&](auto tile) ENCAST_SIMD_BODY {
        if (column == 0 || steps > 1) {
          tiles.template load<3 + tile.value>(a + tile.value * kTileRows * a_bytes + step * kTileBytes,
                                              a_bytes);
        }
        if (step == 0) {
          if (column > 0) store_sums(tile, column - 1);
          tiles.template zero<tile.value>();
        }
        tiles.template multiply<TileProduct::bf16, tile.value, 3 + tile.value, 6>();
      });
    }
  }
  each_row_tile([&](auto tile) ENCAST_SIMD_BODY { store_sums(tile, columns - 1); });
}

// The same for any number of rows.
template <class Tiles, class B>
ENCAST_SIMD void multiply_rows(Tiles& tiles, int64_t rows, const uint8_t* a, int64_t a_bytes, B b,
                               int64_t b_bytes, int64_t columns, int64_t steps, float* c, int64_t c_stride) {
  for (int64_t row = 0; row < rows; row += 3 * kTileRows) {
    with_count<3>((rows - row + kTileRows - 1) / kTileRows, [&](auto row_tiles) ENCAST_SIMD_BODY {
      multiply_tiles<row_tiles.value>(tiles, a + row * a_bytes, a_bytes, b, b_bytes, columns, steps,
                                      c + row * c_stride, c_stride);
    });
  }
}

// The scores of a row against `vectors` times 16 keys from `key` on, from their sums, and their largest so
// far.
ENCAST_SIMD void finish_scores(const NarrowHead& head, int64_t query, int64_t row, int64_t key,
                               int64_t vectors, float* scores) {
  F32x16 top = load(head.lanes + row * 16);
  int64_t v = 0;
  if (head.bias == nullptr) {
    // Most sums are scores as they are.
    for (const int64_t whole = (head.len - key) / 16; v < vectors && v < whole; ++v) {
      top = max(load(scores + 16 * v), top);
    }
  }
  for (; v < vectors; ++v) {
    const F32x16 score = finish_score(head, query, row, key + 16 * v, load(scores + 16 * v));
    top = max(score, top);
    store(scores + 16 * v, score);
  }
  store(head.lanes + row * 16, top);
}

// As narrow_score_block.
template <class Tiles>
ENCAST_SIMD_TILE void tile_score_block(Tiles& tiles, const NarrowHead& head, int64_t query, int64_t rows,
                                       int64_t begin, int64_t end) {
  constexpr int64_t kKeys = 256;  // at a time, so that scores are ended before they leave the near caches
  const int64_t steps = head.query_bytes / kTileBytes;
  for (int64_t row = 0; row < rows; ++row) store(head.lanes + row * 16, set1(-__builtin_inff()));
  for (int64_t key = begin; key < end; key += kKeys) {
    const int64_t vectors = end - key < kKeys ? (end - key + 15) / 16 : kKeys / 16;
    float* scores = head.scores + (key - begin);
    const auto keys_at = [&](int64_t column) ENCAST_SIMD_BODY {
      const int64_t first = key + 16 * column;
      return head.keys + first / kKeyPanel * head.panel_bytes + first % kKeyPanel * 4;
    };
    multiply_rows(tiles, rows, head.queries, head.query_bytes, keys_at, kKeyPanel * 4, vectors, steps, scores,
                  head.score_stride);
    for (int64_t row = 0; row < rows; ++row) {
      finish_scores(head, query, row, key, vectors, scores + row * head.score_stride);
    }
  }
}

// As narrow_context_block. The scores are no longer wanted: their memory takes the sums, 64 columns at a
// time.
template <class Tiles>
ENCAST_SIMD_TILE void tile_context_block(Tiles& tiles, const NarrowHead& head, int64_t query, int64_t rows,
                                         int64_t begin, int64_t end, bool first, bool last) {
  constexpr int64_t kColumns = 64;
  const int64_t steps = (end - begin + 2 * kTileGroups - 1) / (2 * kTileGroups);
  for (int64_t col = 0; col < head.dims; col += kColumns) {
    const int64_t vectors = head.dims - col < kColumns ? (head.dims - col) / 16 : kColumns / 16;
    const uint8_t* values = head.values + (begin / 2 * head.dims + col) * 4;
    const auto values_at = [&](int64_t column) ENCAST_SIMD_BODY { return values + column * kTileBytes; };
    multiply_rows(tiles, rows, head.powers, head.power_bytes, values_at, head.dims * 4, vectors, steps,
                  head.scores, kColumns);
    // A row at a time: its columns are neighbours in the output, the next row is far away.
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t v = 0; v < vectors; ++v) {
        finish_context<false>(head, query, row, col + 16 * v, first, last,
                              load(head.scores + row * kColumns + 16 * v));
      }
    }
  }
}

}  // namespace ENCAST_SIMD_LEVEL
}  // namespace encast
