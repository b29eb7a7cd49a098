#include "kernels/sparse/driver.h"

namespace encast {
namespace {

// u8 times s8 in exact integers without vpdpbusd: pairs of inputs side by side in 16 bits, of which vpmaddwd
// adds two products (vpmaddubsw would saturate: 255 * 127 * 2 does not fit into its 16 bits).
//
//   columns 0 and 1    | x0 of row 0 | x1 of row 0 | x0 of row 1 | ...   8 rows a register
//   weights            | w0          | w1          | w0          | ...
//
// Sixteen rows at a time: 8 sums, 4 registers of pairs, a weight and a product.
struct BlocksAvx2 {
  static constexpr int64_t kRows = 32;
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
    I32x16 sums[kBlockOutputs] = {set1(0), set1(0), set1(0), set1(0)};
    for (int64_t group = 0; group < groups; ++group) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(features + column_of(columns, i) * width));
      };
      const __m128i x0 = input(0), x1 = input(1), x2 = input(2), x3 = input(3);
      const __m256i low01 = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(x0, x1));
      const __m256i high01 = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(x0, x1));
      const __m256i low23 = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(x2, x3));
      const __m256i high23 = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(x2, x3));
      alignas(32) int32_t pairs[kBlockOutputs][2];  // weights of 16 bits, two in each
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs),
                         _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
      asm volatile("" : : "r"(pairs) : "memory");  // loads that broadcast, in place of shuffles
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        I32x16& sum = sums[output];
        const __m256i w01 = _mm256_set1_epi32(pairs[output][0]);
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(low01, w01));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(high01, w01));
        const __m256i w23 = _mm256_set1_epi32(pairs[output][1]);
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(low23, w23));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(high23, w23));
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    }
    store_rows({sums[0].lo, sums[1].lo, sums[2].lo, sums[3].lo}, to, 4);
    store_rows({sums[0].hi, sums[1].hi, sums[2].hi, sums[3].hi}, to + 8 * kPanel, 4);
  }
};

}  // namespace

void sparse_q8_s8_s32_4x16_avx2(const SparseArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                int64_t panel_end) {
  compute_sparse<BlocksAvx2>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
