#pragma once
#include <algorithm>
#include <cstdint>

#include "base/dtype.h"

// How work is split over threads: pure functions of sizes. Bits never depend on them.
namespace encast {

constexpr int64_t kRowGrain = 6;    // rows of a register tile
constexpr int64_t kTileGrain = 32;  // rows that products take at a time in tiles of AMX, see gemm/amx.h

struct Range {
  int64_t begin, end;
};

// Part `part` of `parts` of a range, in multiples of `grain` from its begin; parts differ by at most one
// grain.
constexpr Range split(Range range, int64_t grain, int part, int parts) {
  const int64_t units = (range.end - range.begin + grain - 1) / grain;
  return {std::min(range.end, range.begin + units * part / parts * grain),
          std::min(range.end, range.begin + units * (part + 1) / parts * grain)};
}

// The grain in which `parts` threads share the rows of products. One row more than whole tiles of AMX is
// another trip through all weights, so there it is theirs, where each thread gets as many.
constexpr int64_t row_grain(int64_t rows, int parts, bool tiles) {
  return tiles && (rows + kTileGrain - 1) / kTileGrain % parts == 0 ? kTileGrain : kRowGrain;
}

// [0, rows) in blocks of at most `most` rows, whole grains, that `parts` threads take one by one:
// as many as give each thread the same number, alike to within a row tile. Whole tiles of AMX are kept where
// all blocks have as many. Where threads have many, their last ones are cut in two, so that less is left to
// wait for.
struct Blocks {
  int64_t rows, grain, whole = 0, count = 0;

  constexpr Blocks(int64_t all, int64_t most, int parts, bool tiles)
      : rows(all), grain(tiles && most >= kTileGrain ? kTileGrain : kRowGrain) {
    int64_t units = cut(most, parts);
    if (grain == kTileGrain && (whole == 0 || whole % parts != 0 || units % whole != 0)) {
      grain = kRowGrain;
      units = cut(most, parts);
    }
    const bool many = whole >= 4 * parts && units >= 4 * whole;
    count = many ? whole + parts : whole;
    whole = many ? whole - parts : whole;
  }
  constexpr Range at(int64_t index) const {
    const auto block = [&](int64_t number, int64_t of) {
      return split({0, rows}, grain, static_cast<int>(number), static_cast<int>(of));
    };
    if (index < whole) return block(index, (count + whole) / 2);
    const int64_t half = index - whole;
    return split(block(whole + half / 2, (count + whole) / 2), grain, static_cast<int>(half % 2), 2);
  }

 private:
  // Sets `whole`; the number of grains.
  constexpr int64_t cut(int64_t most, int parts) {
    const int64_t units = (rows + grain - 1) / grain, most_units = std::max(most / grain, int64_t{1});
    whole = std::min(units, round_up(round_up(units, most_units) / most_units, parts));
    return units;
  }
};

// [0, rows) for products that had best get whole tiles of `tile` rows, a multiple of 16: as many for each of
// `parts` threads. What is left is shared by all.
struct TileBlocks {
  int64_t rows, tile, whole, count;

  constexpr TileBlocks(int64_t all, int64_t tile_rows, int parts)
      : rows(all), tile(tile_rows), whole(all / (tile * parts) * parts) {
    count = whole + std::min((rows - whole * tile + kLeast - 1) / kLeast, int64_t{parts});
  }
  constexpr Range at(int64_t index) const {
    if (index < whole) return {index * tile, (index + 1) * tile};
    return split({whole * tile, rows}, kGrain, static_cast<int>(index - whole),
                 static_cast<int>(count - whole));
  }

 private:
  static constexpr int64_t kLeast = 16, kGrain = 8;  // of a share of the rest, and what it is a multiple of
};

struct Tile {
  Range rows, panels;
};

// Below so many rows a core the bytes of a product's weights are the bound. Tiles of AMX are done sooner.
constexpr int64_t stream_rows(bool tiles) { return tiles ? 80 : 64; }

// A product's share of one thread. Few rows: over panels, so that each weight is read by one core only. Many:
// over blocks of rows, which stay in the cache of the core that made them. In between: what idles less.
constexpr Tile split_product(Range rows, int64_t panels, int part, int parts, bool tiles) {
  const int64_t count = rows.end - rows.begin;
  const int64_t grain = row_grain(count, parts, tiles), row_units = (count + grain - 1) / grain;
  const int64_t by_rows = (row_units + parts - 1) / parts * panels;
  const int64_t by_panels = (panels + parts - 1) / parts * row_units;
  const bool over_panels = count < stream_rows(tiles) * parts ? by_panels <= by_rows : by_panels < by_rows;
  if (over_panels) return {rows, split({0, panels}, 1, part, parts)};
  return {split(rows, grain, part, parts), {0, panels}};
}

}  // namespace encast
