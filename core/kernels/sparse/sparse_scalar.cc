#include "kernels/sparse/driver.h"

// The family in plain C++: what every processor can run, and the meaning of the others.
namespace encast {
namespace {

struct BlocksScalar {
  static constexpr int64_t kRows = kTileRows;
  static int64_t width(int64_t rows) { return round_up(rows, 16); }

  static void sums(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                   int32_t* to) {
    for (int64_t i = 0; i < kBlockOutputs * width; ++i)
      to[i / kBlockOutputs * kPanel + i % kBlockOutputs] = 0;
    for (int64_t group = w.starts[block]; group < w.starts[block + 1]; ++group) {
      for (int64_t input = 0; input < kGroupInputs; ++input) {
        const uint8_t* const x = features + w.columns[group * kGroupInputs + input] * width;
        for (int64_t output = 0; output < kBlockOutputs; ++output) {
          const int8_t weight = w.values[(group * kBlockOutputs + output) * kGroupInputs + input];
          for (int64_t i = 0; i < width; ++i) to[i * kPanel + output] += int32_t{x[i]} * int32_t{weight};
        }
      }
    }
  }
};

}  // namespace

void sparse_q8_s8_s32_4x16_scalar(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute_sparse<BlocksScalar>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
