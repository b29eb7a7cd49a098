#include "kernels/attention/attention_impl.h"
#include "kernels/attention/narrow_impl.h"

namespace encast {
namespace {

// As on AVX2: codes of 16 bits for vpmaddwd.
struct IntegerProducts {
  static constexpr int kRows = 6, kVectors = 4, kGroup = 2, kOffset = 0;
  static constexpr bool kIntegers = true, kSignedQueries = true;
  using Sum = I32x16;
  ENCAST_SIMD Sum zero() { return set1(0); }
  ENCAST_SIMD __m512i row(const uint8_t* p) {
    int32_t group;
    __builtin_memcpy(&group, p, sizeof group);
    return _mm512_set1_epi32(group);
  }
  ENCAST_SIMD __m512i columns(const uint8_t* p) { return _mm512_loadu_si512(p); }
  ENCAST_SIMD Sum add(Sum sum, __m512i row, __m512i columns) {
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(row, columns));
    asm("" : "+v"(sum.v));
    return sum;
  }
};

}  // namespace

void attention_f32_6x64_avx512(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                               int64_t query_end, void* scratch) {
  avx512::attention<6, 4, false>(args, seq, head, query_begin, query_end, scratch);
}

void attention_bf16_6x64_avx512(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                                int64_t query_end, void* scratch) {
  avx512::attention<6, 4, true>(args, seq, head, query_begin, query_end, scratch);
}

void attention_s8_6x64_avx512(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                              int64_t query_end, void* scratch) {
  avx512::narrow_attention<IntegerProducts>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
