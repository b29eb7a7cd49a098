#include "kernels/attention/attention_impl.h"
#include "kernels/attention/narrow_impl.h"

namespace encast {
namespace {

// Codes of 16 bits, as on all levels without vpdpbusd.
struct IntegerProducts {
  static constexpr int kRows = 4, kVectors = 1, kGroup = 2, kOffset = 0;
  static constexpr bool kIntegers = true, kSignedQueries = true;
  using Sum = I32x16;
  struct Group {
    int16_t code[2];
  };
  struct Groups {
    int16_t code[16][2];
  };
  ENCAST_SIMD Sum zero() { return set1(0); }
  ENCAST_SIMD Group row(const uint8_t* p) {
    Group group;
    __builtin_memcpy(&group, p, sizeof group);
    return group;
  }
  ENCAST_SIMD Groups columns(const uint8_t* p) {
    Groups groups;
    __builtin_memcpy(&groups, p, sizeof groups);
    return groups;
  }
  ENCAST_SIMD Sum add(Sum sum, Group row, const Groups& columns) {
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 2; ++k) sum.lane[i] += int32_t{row.code[k]} * int32_t{columns.code[i][k]};
    }
    return sum;
  }
};

}  // namespace

void attention_f32_4x16_scalar(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                               int64_t query_end, void* scratch) {
  scalar::attention<4, 1, false>(args, seq, head, query_begin, query_end, scratch);
}

void attention_bf16_4x16_scalar(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                                int64_t query_end, void* scratch) {
  scalar::attention<4, 1, true>(args, seq, head, query_begin, query_end, scratch);
}

void attention_s8_4x16_scalar(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                              int64_t query_end, void* scratch) {
  scalar::narrow_attention<IntegerProducts>(args, seq, head, query_begin, query_end, scratch);
}

}  // namespace encast
