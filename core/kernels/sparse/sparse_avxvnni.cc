#include "kernels/sparse/driver.h"

namespace encast {
namespace {

// As with AVX-512 VNNI, in registers of eight rows. Sixteen rows at a time: 8 sums, 2 registers of
// interleaved columns, a weight.
struct BlocksAvxVnni {
  static constexpr int64_t kRows = kTileRows;
  static int64_t width(int64_t rows) { return round_up(rows, 16); }

  static void sums(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                   int32_t* to) {
    for (int64_t first = 0; first < width; first += 16) {
      slice(features + first, width, w, block, to + first * kPanel);
    }
  }

 private:
  static void slice(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                    int32_t* to) {
    const int64_t begin = w.starts[block], groups = w.starts[block + 1] - begin;
    const uint16_t* columns = w.columns + begin * kGroupInputs;
    const int8_t* values = w.values + begin * kBlockOutputs * kGroupInputs;
    __m256i sums[2][kBlockOutputs];
    ENCAST_UNROLL for (int i = 0; i < 2 * kBlockOutputs; ++i) sums[i % 2][i / 2] = _mm256_setzero_si256();
    for (int64_t group = 0; group < groups; ++group) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(features + column_of(columns, i) * width));
      };
      // Sixteen rows, the inputs i and i + 1 of each side by side.
      const auto pairs = [&](int i) __attribute__((always_inline)) {
        const __m128i a = input(i), b = input(i + 1);
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(a, b)),
                                       _mm_unpackhi_epi8(a, b), 1);
      };
      const __m256i pairs01 = pairs(0), pairs23 = pairs(2);
      const __m256i x[2] = {_mm256_unpacklo_epi16(pairs01, pairs23), _mm256_unpackhi_epi16(pairs01, pairs23)};
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        int32_t four;
        __builtin_memcpy(&four, values + output * kGroupInputs, sizeof four);
        const __m256i weight = _mm256_set1_epi32(four);
        sums[0][output] = _mm256_dpbusd_avx_epi32(sums[0][output], x[0], weight);
        sums[1][output] = _mm256_dpbusd_avx_epi32(sums[1][output], x[1], weight);
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    }
    // The first lane has rows 0 to 7, the second 8 to 15.
    store_rows(sums[0], to, 8);
    store_rows(sums[1], to + 4 * kPanel, 8);
  }
};

}  // namespace

void sparse_q8_s8_s32_4x16_avxvnni(const SparseArgs& args, int64_t m_begin, int64_t m_end,
                                   int64_t panel_begin, int64_t panel_end) {
  compute_sparse<BlocksAvxVnni>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
