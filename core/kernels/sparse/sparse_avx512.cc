#include "kernels/sparse/driver.h"

namespace encast {
namespace {

// As with AVX2, in registers of sixteen rows: pairs of inputs side by side in 16 bits for vpmaddwd.
// Thirty-two rows at a time: 8 sums, 4 registers of pairs, a weight and a product.
struct BlocksAvx512 {
  static constexpr int64_t kRows = kTileRows, kSlice = 32;
  static int64_t width(int64_t rows) { return round_up(rows, kSlice); }

  static void sums(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                   int32_t* to) {
    for (int64_t first = 0; first < width; first += kSlice) {
      slice(features + first, width, w, block, to + first * kPanel);
    }
  }

 private:
  static void slice(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                    int32_t* to) {
    const int64_t begin = w.starts[block], groups = w.starts[block + 1] - begin;
    const uint16_t* columns = w.columns + begin * kGroupInputs;
    const int8_t* values = w.values + begin * kBlockOutputs * kGroupInputs;
    __m512i sums[2][kBlockOutputs];
    ENCAST_UNROLL for (int i = 0; i < 2 * kBlockOutputs; ++i) sums[i % 2][i / 2] = _mm512_setzero_si512();
    for (int64_t group = 0; group < groups; ++group) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm512_cvtepu8_epi16(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(features + column_of(columns, i) * width)));
      };
      const __m512i x0 = input(0), x1 = input(1), x2 = input(2), x3 = input(3);
      const __m512i x01[2] = {_mm512_unpacklo_epi16(x0, x1), _mm512_unpackhi_epi16(x0, x1)};
      const __m512i x23[2] = {_mm512_unpacklo_epi16(x2, x3), _mm512_unpackhi_epi16(x2, x3)};
      alignas(32) int32_t pairs[kBlockOutputs][2];  // weights of 16 bits, two in each
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs),
                         _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
      asm volatile("" : : "r"(pairs) : "memory");  // loads that broadcast, in place of shuffles
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        const __m512i w01 = _mm512_set1_epi32(pairs[output][0]), w23 = _mm512_set1_epi32(pairs[output][1]);
        ENCAST_UNROLL for (int half = 0; half < 2; ++half) {
          __m512i& sum = sums[half][output];
          sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x01[half], w01));
          sum = _mm512_add_epi32(sum, _mm512_madd_epi16(x23[half], w23));
        }
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    }
    // Lane l has rows 8l to 8l + 3 in the first half, and the four after them in the second.
    store_rows(sums[0], to, 8, 16);
    store_rows(sums[1], to + 4 * kPanel, 8, 16);
  }
};

}  // namespace

void sparse_q8_s8_s32_4x32_avx512(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute_sparse<BlocksAvx512>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
