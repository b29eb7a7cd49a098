#include "kernels/attention/narrow_impl.h"

namespace encast {
namespace {

// vpdpbusd on ymm, in its VEX form: queries and powers are its unsigned operand.
struct IntegerProducts {
  static constexpr int kRows = 6, kVectors = 1, kGroup = 4, kOffset = 128;
  static constexpr bool kIntegers = true, kSignedQueries = false;
  using Sum = I32x16;
  ENCAST_SIMD Sum zero() { return set1(0); }
  ENCAST_SIMD __m256i row(const uint8_t* p) {
    int32_t group;
    __builtin_memcpy(&group, p, sizeof group);
    return _mm256_set1_epi32(group);
  }
  ENCAST_SIMD __m256i offset_row() { return _mm256_set1_epi8(static_cast<char>(kOffset)); }
  ENCAST_SIMD I32x16 columns(const uint8_t* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
  ENCAST_SIMD Sum add(Sum sum, __m256i row, I32x16 columns) {
    return {_mm256_dpbusd_avx_epi32(sum.lo, row, columns.lo),
            _mm256_dpbusd_avx_epi32(sum.hi, row, columns.hi)};
  }
};

}  // namespace

void attention_s8_6x16_avxvnni(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                               int64_t query_end, void* scratch) {
  avx2::narrow_attention<IntegerProducts>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
