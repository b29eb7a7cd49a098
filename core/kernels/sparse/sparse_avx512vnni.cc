#include "kernels/sparse/driver.h"

namespace encast {
namespace {

// vpdpbusd wants four inputs of a row side by side: four columns are interleaved, and one such set of
// registers serves four outputs.
struct BlocksVnni {
  static constexpr int64_t kRows = kTileRows;

  static int64_t width(int64_t rows) { return rows <= 32 ? round_up(rows, 16) : kTileRows; }

  static void sums(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                   int32_t* to) {
    const int64_t begin = w.starts[block], groups = w.starts[block + 1] - begin;
    const uint16_t* const columns = w.columns + begin * kGroupInputs;
    const int8_t* const values = w.values + begin * kBlockOutputs * kGroupInputs;
    if (width == kTileRows) {
      rows_64(features, columns, values, groups, to);
    } else if (width == 32) {
      rows_32(features, columns, values, groups, to);
    } else {
      rows_16(features, columns, values, groups, to);
    }
  }

 private:
  // 16 sums, 4 registers of interleaved columns, a weight.
  static void rows_64(const uint8_t* features, const uint16_t* columns, const int8_t* values, int64_t groups,
                      int32_t* to) {
    __m512i sums[4][kBlockOutputs];
    ENCAST_UNROLL for (int i = 0; i < 4 * kBlockOutputs; ++i) sums[i % 4][i / 4] = _mm512_setzero_si512();
    for (int64_t group = 0; group < groups; ++group) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm512_loadu_si512(features + column_of(columns, i) * kTileRows);
      };
      __m512i x[4];
      interleave(input(0), input(1), input(2), input(3), x);
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        const __m512i weight = four_weights(values, output);
        ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
          sums[q][output] = _mm512_dpbusd_epi32(sums[q][output], x[q], weight);
        }
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    }
    // Interleaving within 128-bit lanes leaves rows 16l + 4q to 16l + 4q + 3 in lane l of register q.
    ENCAST_UNROLL for (int q = 0; q < 4; ++q) store_rows(sums[q], to + 4 * q * kPanel, 16, 32);
  }

  // Two columns in a register: six instructions bring the inputs of 32 rows side by side.
  static void rows_32(const uint8_t* features, const uint16_t* columns, const int8_t* values, int64_t groups,
                      int32_t* to) {
    const __m512i words = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i sums[2][kBlockOutputs];
    ENCAST_UNROLL for (int i = 0; i < 2 * kBlockOutputs; ++i) sums[i % 2][i / 2] = _mm512_setzero_si512();
    for (int64_t group = 0; group < groups; ++group) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(features + column_of(columns, i) * 32));
      };
      __m512i x02 = _mm512_inserti64x4(_mm512_castsi256_si512(input(0)), input(2), 1);
      __m512i x13 = _mm512_inserti64x4(_mm512_castsi256_si512(input(1)), input(3), 1);
      // Inputs 0 and 1 of rows 0 to 7 and 16 to 23, then inputs 2 and 3 of them; and of the others. The
      // barriers: clang would make eighteen shuffles of these four.
      asm("" : "+v"(x02), "+v"(x13));
      __m512i x[2] = {_mm512_unpacklo_epi8(x02, x13), _mm512_unpackhi_epi8(x02, x13)};
      asm("" : "+v"(x[0]), "+v"(x[1]));
      ENCAST_UNROLL for (int q = 0; q < 2; ++q) x[q] = _mm512_permutexvar_epi16(words, x[q]);
      asm("" : "+v"(x[0]), "+v"(x[1]));
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        const __m512i weight = four_weights(values, output);
        ENCAST_UNROLL for (int q = 0; q < 2; ++q) {
          sums[q][output] = _mm512_dpbusd_epi32(sums[q][output], x[q], weight);
        }
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    }
    ENCAST_UNROLL for (int q = 0; q < 2; ++q) store_rows(sums[q], to + 8 * q * kPanel, 4, 16);
  }

  // Four columns in a register, and two sets of sums, each of which waits for its last product.
  static void rows_16(const uint8_t* features, const uint16_t* columns, const int8_t* values, int64_t groups,
                      int32_t* to) {
    __m512i sums[2][kBlockOutputs];
    ENCAST_UNROLL for (int i = 0; i < 2 * kBlockOutputs; ++i) sums[i % 2][i / 2] = _mm512_setzero_si512();
    const auto multiply = [&](__m512i(&own)[kBlockOutputs]) __attribute__((always_inline)) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(features + column_of(columns, i) * 16));
      };
      __m512i x = _mm512_castsi128_si512(input(0));
      x = _mm512_inserti32x4(x, input(1), 1);
      x = _mm512_inserti32x4(x, input(2), 2);
      x = _mm512_inserti32x4(x, input(3), 3);
      // The rows of four bytes of each column to a lane, and there to each row its four inputs. The barriers:
      // clang would make nine shuffles of these two.
      asm("" : "+v"(x));
      x = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                   x);
      asm("" : "+v"(x));
      x = _mm512_shuffle_epi8(
          x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        own[output] = _mm512_dpbusd_epi32(own[output], x, four_weights(values, output));
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    };
    for (int64_t pair = 0; pair < groups / 2; ++pair) {
      multiply(sums[0]);
      multiply(sums[1]);
    }
    if (groups % 2 != 0) multiply(sums[0]);
    ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
      sums[0][output] = _mm512_add_epi32(sums[0][output], sums[1][output]);
    }
    store_rows(sums[0], to, 4, 8);
  }

  ENCAST_SIMD __m512i four_weights(const int8_t* values, int output) {
    int32_t four;
    __builtin_memcpy(&four, values + output * kGroupInputs, sizeof four);
    return _mm512_set1_epi32(four);
  }

  // Four columns to registers of four rows a lane, with the four inputs of a row side by side.
  ENCAST_SIMD void interleave(__m512i x0, __m512i x1, __m512i x2, __m512i x3, __m512i (&x)[4]) {
    const __m512i low01 = _mm512_unpacklo_epi8(x0, x1), high01 = _mm512_unpackhi_epi8(x0, x1);
    const __m512i low23 = _mm512_unpacklo_epi8(x2, x3), high23 = _mm512_unpackhi_epi8(x2, x3);
    x[0] = _mm512_unpacklo_epi16(low01, low23);
    x[1] = _mm512_unpackhi_epi16(low01, low23);
    x[2] = _mm512_unpacklo_epi16(high01, high23);
    x[3] = _mm512_unpackhi_epi16(high01, high23);
  }
};

}  // namespace

void sparse_q8_s8_s32_4x64_avx512vnni(const SparseArgs& args, int64_t m_begin, int64_t m_end,
                                      int64_t panel_begin, int64_t panel_end) {
  compute_sparse<BlocksVnni>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
