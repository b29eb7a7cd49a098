#include "kernels/sparse/driver.h"

namespace encast {
namespace {

// vpdpbusd wants four inputs of a row side by side: four columns are interleaved, and one such set of
// registers serves four outputs. Within 128-bit lanes, so that rows come out in a fixed other order, which is
// undone where sums are turned back.
struct BlocksVnni {
  static constexpr int64_t kRows = kTileRows, kNarrow = 16;

  static int64_t width(int64_t rows) { return rows <= kNarrow ? kNarrow : kTileRows; }
  // In the wide form 128-bit lane l of vector q has rows 16l + 4q to 16l + 4q + 3.
  static int64_t row_of(int64_t width, int64_t vector, int lane) {
    return width == kNarrow ? lane : 16 * (lane / 4) + 4 * vector + lane % 4;
  }

  static void sums(const uint8_t* features, int64_t width, const SparseWeight& w, int64_t block,
                   int32_t* to) {
    const int64_t begin = w.starts[block], groups = w.starts[block + 1] - begin;
    const uint16_t* const columns = w.columns + begin * kGroupInputs;
    const int8_t* const values = w.values + begin * kBlockOutputs * kGroupInputs;
    if (width == kNarrow) {
      narrow(features, columns, values, groups, to);
    } else {
      wide(features, columns, values, groups, to);
    }
  }

 private:
  // 64 rows: 16 sums, 4 registers of interleaved columns, a weight.
  static void wide(const uint8_t* features, const uint16_t* columns, const int8_t* values, int64_t groups,
                   int32_t* to) {
    __m512i sums[kBlockOutputs][4];
    ENCAST_UNROLL for (int i = 0; i < kBlockOutputs * 4; ++i) sums[i / 4][i % 4] = _mm512_setzero_si512();
    for (int64_t group = 0; group < groups; ++group) {
      const auto input = [&](int i) __attribute__((always_inline)) {
        return _mm512_loadu_si512(features + int64_t{columns[i]} * kTileRows);
      };
      __m512i x[4];
      interleave(input(0), input(1), input(2), input(3), x);
      ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
        int32_t four;
        __builtin_memcpy(&four, values + output * kGroupInputs, sizeof four);
        const __m512i weight = _mm512_set1_epi32(four);
        ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
          sums[output][q] = _mm512_dpbusd_epi32(sums[output][q], x[q], weight);
        }
      }
      columns += kGroupInputs;
      values += kBlockOutputs * kGroupInputs;
    }
    ENCAST_UNROLL for (int i = 0; i < kBlockOutputs * 4; ++i) {
      _mm512_storeu_si512(to + i / 4 * kTileRows + 16 * (i % 4), sums[i / 4][i % 4]);
    }
  }

  // 16 rows: each 128-bit lane takes a group of its own, and their sums are added in the end. The lanes of
  // groups that do not exist read column 0 with weights of zero.
  static void narrow(const uint8_t* features, const uint16_t* columns, const int8_t* values, int64_t groups,
                     int32_t* to) {
    __m512i sums[kBlockOutputs][4];
    ENCAST_UNROLL for (int i = 0; i < kBlockOutputs * 4; ++i) sums[i / 4][i % 4] = _mm512_setzero_si512();
    for (int64_t group = 0; group < groups; group += 4) {
      const int64_t left = groups - group;
      const auto lanes = static_cast<__mmask8>(left < 4 ? (1u << 2 * left) - 1 : 0xff);  // of 64 bits
      const __m512i weights = _mm512_maskz_loadu_epi64(lanes, values);
      uint16_t last[4 * kGroupInputs];
      if (left < 4) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(last),
                            _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << 4 * left) - 1), columns));
      }
      // volatile: clang would read all of them as a vector, and take them out of it on the ports of the
      // shuffles.
      const volatile uint16_t* const at = left < 4 ? last : columns;
      const auto input = [&](int i) __attribute__((always_inline)) {
        const auto lane = [&](int l) __attribute__((always_inline)) {
          return _mm_loadu_si128(
              reinterpret_cast<const __m128i*>(features + int64_t{at[l * kGroupInputs + i]} * kNarrow));
        };
        const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(0)), lane(1), 1);
        const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(2)), lane(3), 1);
        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      };
      __m512i x[4];
      interleave(input(0), input(1), input(2), input(3), x);
      const __m512i weight[kBlockOutputs] = {
          _mm512_shuffle_epi32(weights, _MM_PERM_AAAA), _mm512_shuffle_epi32(weights, _MM_PERM_BBBB),
          _mm512_shuffle_epi32(weights, _MM_PERM_CCCC), _mm512_shuffle_epi32(weights, _MM_PERM_DDDD)};
      ENCAST_UNROLL for (int i = 0; i < kBlockOutputs * 4; ++i) {
        sums[i / 4][i % 4] = _mm512_dpbusd_epi32(sums[i / 4][i % 4], x[i % 4], weight[i / 4]);
      }
      columns += 4 * kGroupInputs;
      values += 4 * kBlockOutputs * kGroupInputs;
    }
    ENCAST_UNROLL for (int output = 0; output < kBlockOutputs; ++output) {
      ENCAST_UNROLL for (int q = 0; q < 4; ++q) {
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums[output][q]),
                                              _mm512_extracti64x4_epi64(sums[output][q], 1));
        // Lane q of the vector has rows 4q to 4q + 3.
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + output * kNarrow + 4 * q),
                         _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
      }
    }
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
