#include "kernels/attention/bf16_codes.h"
#include "kernels/attention/narrow_impl.h"

namespace encast {
namespace {

// vdpbf16ps adds two products of bf16 to an f32. It rounds in between in its own way and flushes subnormals,
// so no other instruction gives its bits.
struct Bf16Products : Bf16Codes {
  static constexpr int kRows = 6, kVectors = 4, kGroup = 2, kOffset = 0;
  static constexpr bool kIntegers = false;
  using Sum = F32x16;
  ENCAST_SIMD Sum zero() { return set1(0.0f); }
  ENCAST_SIMD __m512i row(const uint8_t* p) {
    int32_t group;
    __builtin_memcpy(&group, p, sizeof group);
    __m512i all = _mm512_set1_epi32(group);
    asm("" : "+v"(all));  // clang 16 crashes where it sees a broadcast become bf16
    return all;
  }
  ENCAST_SIMD __m512i columns(const uint8_t* p) { return _mm512_loadu_si512(p); }
  ENCAST_SIMD Sum add(Sum sum, __m512i row, __m512i columns) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)row, (__m512bh)columns)};
  }
};

}  // namespace

void attention_bf16_6x64_avx512bf16(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                                    int64_t query_end, void* scratch) {
  avx512::narrow_attention<Bf16Products>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
