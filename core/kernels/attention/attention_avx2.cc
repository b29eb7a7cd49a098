#include "kernels/attention/attention_impl.h"
#include "kernels/attention/narrow_impl.h"

namespace encast {
namespace {

// Without vpdpbusd codes are 16 bits wide: vpmaddwd adds two products into 32 bits, exactly.
struct IntegerProducts {
  static constexpr int kRows = 5, kVectors = 1, kGroup = 2, kOffset = 0;
  static constexpr bool kIntegers = true, kSignedQueries = true;
  using Sum = I32x16;
  ENCAST_SIMD Sum zero() { return set1(0); }
  ENCAST_SIMD __m256i row(const uint8_t* p) {
    int32_t group;
    __builtin_memcpy(&group, p, sizeof group);
    return _mm256_set1_epi32(group);
  }
  ENCAST_SIMD I32x16 columns(const uint8_t* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
  ENCAST_SIMD Sum add(Sum sum, __m256i row, I32x16 columns) {
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(row, columns.lo));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(row, columns.hi));
    // Else the compiler makes all products first, and runs out of registers for them.
    asm("" : "+x"(sum.lo), "+x"(sum.hi));
    return sum;
  }
};

}  // namespace

void attention_f32_6x16_avx2(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                             int64_t query_end, void* scratch) {
  avx2::attention<6, 1, false>(args, seq, head, query_begin, query_end, scratch);
}

void attention_bf16_6x16_avx2(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                              int64_t query_end, void* scratch) {
  avx2::attention<6, 1, true>(args, seq, head, query_begin, query_end, scratch);
}

void attention_s8_5x16_avx2(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                            int64_t query_end, void* scratch) {
  avx2::narrow_attention<IntegerProducts>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
