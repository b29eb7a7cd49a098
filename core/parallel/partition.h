#pragma once
#include <algorithm>
#include <cstdint>

// How work is split over threads: pure functions of sizes. Bits never depend on them.
namespace encast {

struct Range {
  int64_t begin, end;
};

// Part `part` of `parts` of [0, count), in multiples of `grain`; parts differ by at most one grain.
constexpr Range split(int64_t count, int64_t grain, int part, int parts) {
  const int64_t units = (count + grain - 1) / grain;
  return {std::min(count, units * part / parts * grain), std::min(count, units * (part + 1) / parts * grain)};
}

struct Tile {
  Range rows, panels;
};

// A product's share of one thread. Few rows: over panels, so that each weight is read by one core only. Many:
// over blocks of rows, which stay in the cache of the core that made them. In between: what idles less.
constexpr Tile split_product(int64_t rows, int64_t panels, int part, int parts) {
  constexpr int64_t kRowGrain = 6;     // rows of a register tile
  constexpr int64_t kStreamRows = 64;  // below this many rows a core the weights' bytes are the bound
  const int64_t row_units = (rows + kRowGrain - 1) / kRowGrain;
  const int64_t by_rows = (row_units + parts - 1) / parts * panels;
  const int64_t by_panels = (panels + parts - 1) / parts * row_units;
  const bool over_panels = rows < kStreamRows * parts ? by_panels <= by_rows : by_panels < by_rows;
  if (over_panels) return {{0, rows}, split(panels, 1, part, parts)};
  return {split(rows, kRowGrain, part, parts), {0, panels}};
}

}  // namespace encast
