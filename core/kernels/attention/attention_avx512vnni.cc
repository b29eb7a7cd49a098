#include "kernels/attention/narrow_impl.h"

namespace encast {
namespace {

// vpdpbusd: queries and powers are its unsigned operand.
struct IntegerProducts {
  static constexpr int kRows = 6, kVectors = 4, kGroup = 4, kOffset = 128;
  static constexpr bool kIntegers = true, kSignedQueries = false;
  using Sum = I32x16;
  ENCAST_SIMD Sum zero() { return set1(0); }
  ENCAST_SIMD __m512i row(const uint8_t* p) {
    int32_t group;
    __builtin_memcpy(&group, p, sizeof group);
    return _mm512_set1_epi32(group);
  }
  ENCAST_SIMD __m512i offset_row() { return _mm512_set1_epi8(static_cast<char>(kOffset)); }
  ENCAST_SIMD __m512i columns(const uint8_t* p) { return _mm512_loadu_si512(p); }
  ENCAST_SIMD Sum add(Sum sum, __m512i row, __m512i columns) {
    return {_mm512_dpbusd_epi32(sum.v, row, columns)};
  }
};

}  // namespace

void attention_s8_6x64_avx512vnni(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                                  int64_t query_end, void* scratch) {
  avx512::narrow_attention<IntegerProducts>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
