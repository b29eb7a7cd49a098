#pragma once
#include "kernels/gemm/dots.h"
#include "kernels/gemm/epilogue.h"
#include "simd/amx.h"

// Products by AMX, over the interface of simd/amx.h: the same source runs on the processor and on a stand-in.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to 16 x 16 sums the products of 16 rows of
// `a`, 16 groups each, and 16 groups of a panel, 16 columns each: a panel is in the order that it wants, with
// kPanelBytes from group to group. Of the eight registers
//
//              B6: columns 0-15   B7: columns 16-31
//   A4: rows 0-15    C0                C1              32 x 32 outputs: four loads for four products
//   A5: rows 16-31   C2                C3
//
// 16 groups are a *step*, half a panel and all its steps (of a block of k) a *job*. The unit of tiles takes
// 64 cycles for a step and leaves the rest of the core idle, so everything else is done between steps: sums
// of one job are stored among the products of the next one's first step, and go through the epilogue during
// the others, while weights that come next are prefetched.
//
//   for blocks of panels                    which stay in L2; of one where k is in blocks
//     for 32 rows
//       for blocks of k                     so that the rows' `a` stays in L1
//         for panels, for both halves       a job: weights stream from L2
//
// Sums of all but the last block of k wait in `partial_`, which changes nothing. The last groups of k, fewer
// than 16, are copied into zeroed blocks. Rows that do not exist are left out by the tile configuration,
// which therefore changes with the number of rows.
namespace encast {
namespace {

// Rows of C0, C1, A4 and of C2, C3, A5. Without lower rows their registers stay unconfigured and unused.
ENCAST_SIMD TileConfig tile_config(int64_t upper, int64_t lower) {
  TileConfig config;
  const int64_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileGroups, kTileGroups};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    config.row_bytes[tile] = rows[tile] > 0 ? kTileBytes : 0;
  }
  return config;
}

// What the epilogue wants to know of the sums.
struct AmxQ8 : DotQ8Base<Shape6x64> {
  static constexpr TileProduct kProduct = TileProduct::u8s8;
};
struct AmxBF16 {
  using Sum = F32x16;
  static constexpr int kGroup = 2;
  static constexpr bool kQuantized = false;
  static constexpr TileProduct kProduct = TileProduct::bf16;
  ENCAST_SIMD Sum zero() { return set1(0.0f); }
};

template <class Dot, class Instructions>
class AmxProduct {
 public:
  explicit AmxProduct(const GemmArgs& args)
      : args_(args),
        groups_((args.k + Dot::kGroup - 1) / Dot::kGroup),
        a_stride_(args.a_stride * (kGroupBytes / Dot::kGroup)),
        bump_(coarse_form(args)),
        direct_(args.c_bf16 == nullptr &&
                (args.activation == Activation::none || (args.residual == nullptr && bump_ != nullptr))) {}

  void run(int64_t m_begin, int64_t m_end, int64_t panel_begin, int64_t panel_end) {
    const int64_t k_blocks = groups_ > kMostGroups ? (groups_ + kMostGroups - 1) / kMostGroups : 1;
    const int64_t steps = (groups_ + kTileGroups - 1) / kTileGroups;
    const int64_t block_groups = (steps + k_blocks - 1) / k_blocks * kTileGroups;
    const int64_t panel_bytes = groups_ * kPanelBytes;
    const int64_t most_panels = k_blocks > 1 ? 1 : kBlockWeightBytes / (panel_bytes > 0 ? panel_bytes : 1);
    const int64_t row_tiles = (m_end - m_begin + kRows - 1) / kRows;
    for (int64_t panel = panel_begin, panels; panel < panel_end; panel += panels) {
      panels = panel_end - panel < most_panels ? panel_end - panel : most_panels;
      const int64_t rest = panel_end - panel - panels, next = rest < most_panels ? rest : most_panels;
      if (next > 0) {
        prefetch_during(weights(panel + panels, 0), next * panel_bytes, row_tiles * 2 * panels * steps);
      } else {
        const int64_t bytes = args_.next_w_bytes * args_.next_w_panels;
        prefetch_during(static_cast<const uint8_t*>(args_.next_w),
                        bytes < kBlockWeightBytes ? bytes : kBlockWeightBytes,
                        row_tiles * 2 * panels * steps);
      }
      for (int64_t row = m_begin; row < m_end; row += kRows) {
        const int64_t rows = m_end - row < kRows ? m_end - row : kRows;
        int64_t g = 0;
        do {  // once at least: without k, c is the epilogue of zeros
          const int64_t count = groups_ - g < block_groups ? groups_ - g : block_groups;
          for (int64_t half = 0; half < 2 * panels; ++half) {
            float* const partial = k_blocks > 1 ? partial_[half] : nullptr;
            const Job job = {.a = static_cast<const uint8_t*>(args_.a) + row * a_stride_ + g * kGroupBytes,
                             .w = weights(panel + half / 2, g) + half % 2 * kHalfBytes,
                             .groups = count,
                             .partial = partial,
                             .resume = g > 0,
                             .last = g + count == groups_,
                             .row = row,
                             .rows = rows,
                             .column = panel * kPanel + half * kColumns};
            if (rows > kTileRows) {
              run_job<true>(job);
            } else {
              run_job<false>(job);
            }
          }
          g += count;
        } while (g < groups_);
      }
    }
    drain();
    // Tile registers left in use would make the kernel save 8 KB at every context switch.
    tiles_.release();
  }

 private:
  static constexpr int64_t kRows = 2 * kTileRows, kColumns = 2 * kTileColumns;
  static constexpr int64_t kHalfBytes = 2 * kVectorBytes;  // of a group
  static constexpr int64_t kMostGroups = 256;              // of a block of k: 32 KB of 32 rows of `a`
  static constexpr int64_t kBlockWeightBytes = 256 << 10;  // of a block of panels
  static constexpr int64_t kMostAhead = 32;                // lines a step: more would hold up its own loads
  static constexpr int64_t kUnitRows = 4;                  // that go through the epilogue between two steps

  struct Job {
    const uint8_t* a;
    const uint8_t* w;
    int64_t groups;
    float* partial;  // sums between blocks of k, [kRows][kColumns]; null when there is one block
    bool resume;     // from them
    bool last;       // block of k
    int64_t row, rows, column;
  };

  const uint8_t* weights(int64_t panel, int64_t g) const {
    return static_cast<const uint8_t*>(args_.w) + (panel * groups_ + g) * kPanelBytes;
  }

  void prefetch_during(const uint8_t* from, int64_t bytes, int64_t steps) {
    ahead_ = from;
    ahead_end_ = from + (from != nullptr ? bytes : 0);
    const int64_t lines = (bytes + kVectorBytes - 1) / kVectorBytes;
    const int64_t due = steps > 0 ? (lines + steps - 1) / steps : 0;
    ahead_step_ = (due < kMostAhead ? due : kMostAhead) * kVectorBytes;
  }

  // Sums of the job before are stored among the products of the first step, because a store waits for its
  // sums: after the last step it would idle the unit for as long as that one takes.
  template <bool lower>
  void run_job(const Job& job) {
    if (job.rows != configured_rows_) {
      drain();
      const int64_t upper = job.rows < kTileRows ? job.rows : kTileRows;
      tiles_.configure(tile_config(upper, job.rows - upper));
      configured_rows_ = job.rows;
    }
    const int64_t whole = job.groups / kTileGroups;
    if (whole == 0) {
      tail<lower, true>(job, 0);
    } else {
      step<lower, true>(job, job.a, a_stride_, job.w, kPanelBytes);
    }
    start_epilogue();
    const int64_t steps = (job.groups + kTileGroups - 1) / kTileGroups - 1;
    const int64_t units = (epilogue_.rows + kUnitRows - 1) / kUnitRows;
    int64_t due = 0;
    for (int64_t s = 1; s < whole; ++s) {
      const int64_t g = s * kTileGroups;
      step<lower, false>(job, job.a + g * kGroupBytes, a_stride_, job.w + g * kPanelBytes, kPanelBytes);
      for (due += units; due >= steps; due -= steps) finish_unit();
    }
    if (whole > 0 && job.groups % kTileGroups != 0) tail<lower, false>(job, whole * kTileGroups);
    while (epilogue_.rows > 0) finish_unit();
    ++jobs_;
    stored_ = {.sums = job.last ? staged_[jobs_ % 2] : job.partial, .job = job};
  }

  template <bool lower, bool first>
  [[gnu::always_inline]] void step(const Job& job, const uint8_t* a, int64_t a_stride, const uint8_t* w,
                                   int64_t w_stride) {
    for (const uint8_t* end = ahead_ + ahead_step_; ahead_ < end && ahead_ < ahead_end_;
         ahead_ += kVectorBytes) {
      __builtin_prefetch(ahead_, 0, 2);
    }
    tiles_.template stream<6>(w, w_stride);
    tiles_.template load<4>(a, a_stride);
    if constexpr (first) begin<lower, 0>(job);
    tiles_.template multiply<Dot::kProduct, 0, 4, 6>();
    tiles_.template stream<7>(w + kVectorBytes, w_stride);
    if constexpr (first) begin<lower, 1>(job);
    tiles_.template multiply<Dot::kProduct, 1, 4, 7>();
    if constexpr (lower) {
      tiles_.template load<5>(a + kTileRows * a_stride, a_stride);
      if constexpr (first) begin<lower, 2>(job);
      tiles_.template multiply<Dot::kProduct, 2, 5, 6>();
      if constexpr (first) begin<lower, 3>(job);
      tiles_.template multiply<Dot::kProduct, 3, 5, 7>();
    }
  }

  // Register t: the sums of the job before go to their place, those of this one come.
  template <bool lower, int t>
  [[gnu::always_inline]] void begin(const Job& job) {
    constexpr int64_t at = t / 2 * kTileRows * kColumns + t % 2 * kTileColumns;
    constexpr int64_t stride = kColumns * int64_t{sizeof(float)};
    if (stored_.sums != nullptr) tiles_.template store<t>(stored_.sums + at, stride);
    if (job.resume) {
      tiles_.template load<t>(job.partial + at, stride);
    } else {
      tiles_.template zero<t>();
    }
  }

  template <bool lower, bool first>
  [[gnu::noinline]] void tail(const Job& job, int64_t g) {
    alignas(64) uint8_t a[kRows][kTileBytes] = {};
    alignas(64) uint8_t columns[kTileGroups][kHalfBytes] = {};
    const int64_t groups = job.groups - g;
    for (int64_t i = 0; i < job.rows; ++i) {
      __builtin_memcpy(a[i], job.a + i * a_stride_ + g * kGroupBytes,
                       static_cast<size_t>(groups * kGroupBytes));
    }
    for (int64_t i = 0; i < groups; ++i) {
      __builtin_memcpy(columns[i], job.w + (g + i) * kPanelBytes, kHalfBytes);
    }
    step<lower, first>(job, a[0], kTileBytes, columns[0], kHalfBytes);
  }

  // What has been stored is finished from now on.
  void start_epilogue() {
    if (stored_.sums == nullptr || !stored_.job.last) return;
    epilogue_ = {stored_.sums, stored_.job.row, stored_.job.rows, stored_.job.column};
  }

  void finish_unit() {
    const int64_t rows = epilogue_.rows < kUnitRows ? epilogue_.rows : kUnitRows;
    const int64_t columns = args_.n - epilogue_.column;
    if (!direct_ || columns < kColumns) {
      finish_tile<Dot, kColumns>(args_, epilogue_.sums, epilogue_.row, rows, epilogue_.column, columns);
    } else if (bump_ != nullptr) {
      finish_rows<true>(rows);
    } else {
      finish_rows<false>(rows);
    }
    epilogue_.sums += rows * kColumns;
    epilogue_.row += rows;
    epilogue_.rows -= rows;
  }

  // The frequent case in few instructions: they share the core's front end with the steps.
  template <bool kCoarse>
  [[gnu::noinline]] void finish_rows(int64_t rows) const {
    const GemmArgs args = args_;  // see DotTiles::store_tile
    const Epilogue at = epilogue_;
    const Bump* const bump = bump_;
    const auto left = Columns<Dot::kQuantized>::at(args, at.column);
    const auto right = Columns<Dot::kQuantized>::at(args, at.column + kTileColumns);
    for (int64_t i = 0; i < rows; ++i) {
      const float* sums = at.sums + i * kColumns;
      store_outputs<Dot, kCoarse>(args, left, at.row + i, at.column, load_sums(sums, Dot::zero()), bump);
      store_outputs<Dot, kCoarse>(args, right, at.row + i, at.column + kTileColumns,
                                  load_sums(sums + kTileColumns, Dot::zero()), bump);
    }
  }

  // The sums that are still in registers.
  void drain() {
    if (stored_.sums == nullptr) return;
    constexpr int64_t stride = kColumns * int64_t{sizeof(float)};
    tiles_.template store<0>(stored_.sums, stride);
    tiles_.template store<1>(stored_.sums + kTileColumns, stride);
    if (stored_.job.rows > kTileRows) {
      tiles_.template store<2>(stored_.sums + kTileRows * kColumns, stride);
      tiles_.template store<3>(stored_.sums + kTileRows * kColumns + kTileColumns, stride);
    }
    start_epilogue();
    while (epilogue_.rows > 0) finish_unit();
    stored_ = {};
  }

  struct Stored {
    float* sums = nullptr;  // where they are to go
    Job job = {};           // whose they are
  };
  struct Epilogue {
    const float* sums = nullptr;
    int64_t row = 0, rows = 0, column = 0;
  };

  const GemmArgs args_;
  const int64_t groups_, a_stride_;
  const Bump* const bump_;
  const bool direct_;  // whether all that the epilogue has to do is what store_outputs can
  Instructions tiles_;
  int64_t configured_rows_ = 0, jobs_ = 0;
  const uint8_t *ahead_ = nullptr, *ahead_end_ = nullptr;
  int64_t ahead_step_ = 0;
  Stored stored_;
  Epilogue epilogue_;
  alignas(64) float staged_[2][kRows * kColumns];
  alignas(64) float partial_[2][kRows * kColumns];
};

template <class Dot, class Instructions>
void compute_amx(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                 int64_t panel_end) {
  if (m_begin >= m_end || panel_begin >= panel_end) return;
  AmxProduct<Dot, Instructions>(args).run(m_begin, m_end, panel_begin, panel_end);
}

}  // namespace
}  // namespace encast
