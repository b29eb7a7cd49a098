#include "kernels/gemm/dots.h"
#include "kernels/gemm/driver.h"

// The family in plain C++: what every processor can run, and the meaning of the others.
namespace encast {
namespace {

struct DotQ8 : DotQ8Base<Shape4x16> {
  static constexpr int kPhases = 1;
  struct Group {
    uint8_t k[4];
  };
  struct Groups {
    int8_t k[16][4];
  };
  template <int P>
  ENCAST_SIMD Group row(const uint8_t* p) {
    return load_as<Group>(p);
  }
  template <int P>
  ENCAST_SIMD Groups columns(const uint8_t* p) {
    return load_as<Groups>(p);
  }
  ENCAST_SIMD I32x16 add(I32x16 sum, Group row, const Groups& columns) {
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < 4; ++k) sum.lane[i] += int32_t{row.k[k]} * int32_t{columns.k[i][k]};
    }
    return sum;
  }
};

}  // namespace

void gemm_f32_f32_f32_4x16_scalar(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                  int64_t panel_end) {
  compute<DotTiles<DotF32<Shape4x16>>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_bf16_bf16_f32_4x16_scalar(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                    int64_t panel_end) {
  compute<DotTiles<DotBF16<Shape4x16>>>(args, m_begin, m_end, panel_begin, panel_end);
}
void gemm_q8_s8_s32_4x16_scalar(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                                int64_t panel_end) {
  compute<DotTiles<DotQ8>>(args, m_begin, m_end, panel_begin, panel_end);
}

}  // namespace encast
