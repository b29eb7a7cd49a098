#pragma once
#include "kernels/gemm/epilogue.h"

// Blocking: which tile is computed when, and what becomes of its sums.
//
//   for blocks of rows                      whose `a` stays in L2 while all panels pass by
//     for blocks of kBlockGroups            so that a panel's block is at most 256 KB and stays in L2 too
//       for panels                          weights stream from memory or L3 once a row block
//         for tiles of rows                 a few rows of `a` in L1
//
// Sums of all but the last block of k are stored into c as they are (f32, or the bits of int32) and loaded
// again, which changes nothing. The last block goes through the epilogue in registers. Two kinds of panel
// take a detour over a tile staged in L1: those cut off by n, because c must not be touched beyond it, and
// those with an activation, whose polynomial would leave no room for the sums and be inlined for each of
// them.
namespace encast {
namespace {

constexpr int64_t kBlockGroups = 1024;       // of k
constexpr int64_t kBlockABytes = 256 << 10;  // of `a`, in a block of rows

// What is asked of a tile: sums over `groups` groups of its rows and the panel's 64 columns.
struct TileJob {
  const uint8_t* a;
  int64_t a_stride;  // bytes
  const uint8_t* w;
  int64_t groups;
  const uint8_t* ahead;  // weights to prefetch,
  int64_t ahead_step;    //   so many bytes a group
  const float* resume;   // sums to go on from, or null for zeros
  int64_t resume_stride;
  float* sums;  // where the sums go as they are, or null: through the epilogue into c
  int64_t sums_stride;
  const float* cold_c;  // where in c the tile stores, if it is the first to touch it, else null
  int64_t row, column;  // of the tile's first output
};

// Tiles made of a Dot.
template <class DotType>
struct DotTiles {
  using Dot = DotType;
  static constexpr int kRows = Dot::Shape::kRows;
  static constexpr bool kHasEpilogue = Dot::Shape::kEpilogue;
  static constexpr bool kActivates = Dot::Shape::kActivates;

  void run(const GemmArgs& args, TileJob job, int64_t rows) {
    if constexpr (Dot::kWideRows) {
      // Only sums that are staged come with more groups than a block has.
      for (; job.groups > kBlockGroups; job.groups -= kBlockGroups) {
        TileJob part = job;
        part.groups = kBlockGroups;
        run_from<1>(args, part, rows);
        job.a += kBlockGroups * kGroupBytes;
        job.w += kBlockGroups * kPanelBytes;
        job.ahead += kBlockGroups * job.ahead_step;
        job.resume = job.sums;
        job.resume_stride = job.sums_stride;
      }
    }
    run_from<1>(args, job, rows);
  }

  // Rows are shared out evenly: 16 are 6, 5 and 5, because a tile of 4 or less is bound by its loads.
  static int64_t tile_rows(int64_t rows_left) {
    const int64_t tiles = (rows_left + kRows - 1) / kRows;
    return (rows_left + tiles - 1) / tiles;
  }

  // Whether tiles of so few rows take panels at once and are done with them before memory has the next: then
  // the hardware foresees what is read, and prefetches would only take the place of its own. All k are one
  // block then, for which wide rows have no room.
  static bool streams(int64_t rows) {
    return !Dot::kWideRows && rows <= kRows / 2 &&
           Dot::Shape::vectors(static_cast<int>(rows)) == kPanelVectors;
  }

  // Bytes to prefetch with each group, so that `bytes` are asked for in the course of `groups`: spread
  // evenly, because memory then has all the time that the products take. Tiles narrower than the panel go
  // through it more than once and ask for it all.
  static int64_t ahead_step(int64_t bytes, int64_t groups) {
    if (Dot::Shape::vectors(kRows) < kPanelVectors) return kPanelBytes;
    const int64_t step = (bytes + groups - 1) / groups;
    return step < kPanelBytes ? step : kPanelBytes;
  }

 private:
  template <int R>
  static void run_from(const GemmArgs& args, const TileJob& job, int64_t rows) {
    if (rows == R) return run_tile<R>(args, job);
    if constexpr (R < kRows) run_from<R + 1>(args, job, rows);
  }

  template <int R>
  static void run_tile(const GemmArgs& args, const TileJob& job) {
    constexpr int V = Dot::Shape::vectors(R);
    if constexpr (V == kPanelVectors && R > kRows / 2) {
      if (job.ahead_step <= kVectorBytes) return tile<R, V, 1>(args, job);
    }
    if (V < kPanelVectors || job.ahead_step > 2 * kVectorBytes) return tile<R, V, V>(args, job);
    return tile<R, V, 2>(args, job);
  }

  template <int R, int V, int kLines>
  [[gnu::noinline]] static void tile(const GemmArgs& args, const TileJob& job) {
    const uint8_t* a = job.a;
    int64_t a_stride = job.a_stride;
    // Rows are widened once for all the times that the tile goes through the panel.
    constexpr int64_t kWideBytes = Dot::kWideRows ? R * (kBlockGroups * 2 * kGroupBytes + kVectorBytes) : 1;
    alignas(64) uint8_t wide[kWideBytes];
    if constexpr (Dot::kWideRows) {
      a_stride = (job.groups * 2 * kGroupBytes + kVectorBytes) / kVectorBytes * kVectorBytes;
      for (int i = 0; i < R; ++i) Dot::widen(job.a + i * job.a_stride, job.groups, wide + i * a_stride);
      a = wide;
    }
    if constexpr (V == kPanelVectors) {
      // The sums are stored in one burst. Lines that come from L3 or memory only then fill the queue of
      // stores, and the next tile waits for them.
      if (job.cold_c != nullptr) {
        ENCAST_UNROLL for (int i = 0; i < R; ++i) {
          ENCAST_UNROLL for (int v = 0; v < V; ++v) {
            __builtin_prefetch(job.cold_c + i * args.c_stride + 16 * v, 1);
          }
        }
      }
    }
    for (int first = 0; first < kPanel; first += 16 * V) {
      typename Dot::Sum sums[R][V];
      ENCAST_UNROLL for (int i = 0; i < R; ++i) {
        ENCAST_UNROLL for (int v = 0; v < V; ++v) {
          sums[i][v] = job.resume == nullptr
                           ? Dot::zero()
                           : load_sums(job.resume + i * job.resume_stride + first + 16 * v, Dot::zero());
        }
      }
      accumulate<Dot, R, V, kLines>(sums, a, a_stride, job.w + first / 16 * kVectorBytes, job.groups,
                                    job.ahead + first / (16 * V) * job.groups * V * kVectorBytes,
                                    V < kPanelVectors ? V * kVectorBytes : job.ahead_step);
      if (!kHasEpilogue || job.sums != nullptr) {
        ENCAST_UNROLL for (int i = 0; i < R; ++i) {
          ENCAST_UNROLL for (int v = 0; v < V; ++v) {
            store_sums(job.sums + i * job.sums_stride + first + 16 * v, sums[i][v]);
          }
        }
        continue;
      }
      if constexpr (kHasEpilogue) {
        if constexpr (kActivates) {
          if (const Bump* bump = coarse_form(args)) {
            asm("" : "+r"(bump));  // one copy of the code for all tables
            store_tile<R, V, true>(args, job, first, sums, bump);
            continue;
          }
        }
        store_tile<R, V, false>(args, job, first, sums, nullptr);
      }
    }
  }

  // The arguments are copied, because a store of a vector may change any memory that the compiler has not
  // seen the making of: it would load them again for every vector.
  template <int R, int V, bool kCoarse>
  ENCAST_SIMD void store_tile(const GemmArgs args, const TileJob job, int first,
                              const typename Dot::Sum (&sums)[R][V], const Bump* bump) {
    ENCAST_UNROLL for (int v = 0; v < V; ++v) {
      const int64_t column = job.column + first + 16 * v;
      const auto columns = Columns<Dot::kQuantized>::at(args, column);
      ENCAST_UNROLL for (int i = 0; i < R; ++i) {
        store_outputs<Dot, kCoarse>(args, columns, job.row + i, column, sums[i][v], bump);
      }
    }
  }
};

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

// As many rows as keep their `a` in L2, in blocks of equal size so that none is left with a few rows.
template <class Tiles>
int64_t block_rows(int64_t rows, int64_t block_groups) {
  const int64_t fitting = kBlockABytes / (kGroupBytes * (block_groups > 0 ? block_groups : 1));
  const int64_t blocks = fitting > 0 ? (rows + fitting - 1) / fitting : rows;
  const int64_t even = (rows + blocks - 1) / blocks;
  return (even + Tiles::kRows - 1) / Tiles::kRows * Tiles::kRows;
}

// Weights that come next, to be prefetched while a panel is multiplied.
struct Ahead {
  const uint8_t* at;
  int64_t bytes;
};

// The body of every kernel but those of AMX: a GemmFn over DotTiles.
template <class Tiles>
ENCAST_SIMD void compute(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                         int64_t panel_end) {
  using Dot = typename Tiles::Dot;
  if (m_begin >= m_end || panel_begin >= panel_end) return;
  Tiles tiles;
  alignas(64) float staged[Tiles::kRows * kPanel] = {};
  const int64_t groups = (args.k + Dot::kGroup - 1) / Dot::kGroup;
  // Few rows use a panel once, so it need not stay in L2, and between blocks of k the next panel's block
  // would not be what follows in memory. A c of bf16 has no room for the sums of a block.
  const bool streams = Tiles::streams(m_end - m_begin);
  const bool whole_k = groups < kBlockGroups || streams || args.c_bf16 != nullptr;
  const int64_t block_groups = whole_k ? groups : kBlockGroups;
  const int64_t a_stride = args.a_stride * (kGroupBytes / Dot::kGroup);
  // Whether tiles put their sums through the epilogue themselves.
  const bool direct = Tiles::kHasEpilogue && args.c_bf16 == nullptr &&
                      (args.activation == Activation::none ||
                       (Tiles::kActivates && args.residual == nullptr && coarse_form(args) != nullptr));
  const int64_t rows_step = block_rows<Tiles>(m_end - m_begin, block_groups);
  // The weights of a panel from group g on, as far as its block of k goes.
  const auto weights = [&](int64_t panel, int64_t g) {
    const int64_t count = groups - g < block_groups ? groups - g : block_groups;
    return Ahead{static_cast<const uint8_t*>(args.w) + (panel * groups + g) * kPanelBytes,
                 count * kPanelBytes};
  };
  for (int64_t block = m_begin; block < m_end; block += rows_step) {
    const int64_t block_end = block + rows_step < m_end ? block + rows_step : m_end;
    int64_t g = 0;
    do {  // once at least: without k, c is the epilogue of zeros
      const int64_t count = groups - g < block_groups ? groups - g : block_groups;
      const bool last = g + count == groups;
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const int64_t column = panel * kPanel;
        const int64_t columns = args.n - column < kPanel ? args.n - column : kPanel;
        const bool whole = columns == kPanel;
        const uint8_t* const w = weights(panel, g).at;
        Ahead next = panel + 1 < panel_end ? (streams ? Ahead{} : weights(panel + 1, g))
                     : !last               ? weights(panel_begin, g + count)
                     : block_end < m_end   ? weights(panel_begin, 0)
                                         : Ahead{static_cast<const uint8_t*>(args.next_w), args.next_w_bytes};
        const int64_t row_tiles = (block_end - block + Tiles::kRows - 1) / Tiles::kRows;
        const int64_t step =
            next.bytes > 0 && count > 0 ? Tiles::ahead_step(next.bytes, row_tiles * count) : 0;
        for (int64_t row = block, rows; row < block_end; row += rows) {
          rows = Tiles::tile_rows(block_end - row);
          float* c = args.c != nullptr ? args.c + row * args.c_stride + column : nullptr;
          const bool stage = !whole || (last && !direct);
          const TileJob job = {
              .a = static_cast<const uint8_t*>(args.a) + row * a_stride + g * kGroupBytes,
              .a_stride = a_stride,
              .w = w,
              .groups = count,
              // Where nothing more is to be asked for, the first lines of the present panel stand in.
              .ahead = next.bytes > 0 ? next.at : w,
              .ahead_step = step,
              .resume = g == 0  ? nullptr
                        : whole ? c
                                : staged,
              .resume_stride = whole ? args.c_stride : kPanel,
              .sums = stage  ? staged
                      : last ? nullptr
                             : c,
              .sums_stride = stage ? kPanel : args.c_stride,
              .cold_c = stage || g > 0 ? nullptr : c,
              .row = row,
              .column = column,
          };
          if (g > 0 && !whole) copy_sums(c, args.c_stride, staged, kPanel, rows, columns);
          tiles.run(args, job, rows);
          if (stage && last) finish_tile<Dot>(args, staged, row, rows, column, columns);
          if (stage && !last) copy_sums(staged, kPanel, c, args.c_stride, rows, columns);
          next.at += step * count;
          next.bytes -= step * count;
        }
      }
      g += count;
    } while (g < groups);
  }
}

}  // namespace
}  // namespace encast
