#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/rotary/rotary.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"
#include "testing/tolerance.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/rotary/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/rotary/kernels.inc"
#undef ENCAST_KERNEL
};

constexpr int64_t kRows = 7, kFirst = 2;  // rows 2 to 6 are positions 0 to 4

void check_shape(int64_t heads, int64_t head_dim, int64_t rest, Rng& rng) {
  const int64_t turned = heads * head_dim, cols = turned + rest, half = head_dim / 2;
  GuardedMatrix<float> x(kRows, cols, cols + 3), table(kRows - kFirst, head_dim), first(kRows, cols);
  rng.fill_normal(x.buffer.span());
  x.buffer.make_read_only();
  for (int64_t p = 0; p < table.rows; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(p) *
                           std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      table.at(p, i) = static_cast<float>(std::cos(angle));
      table.at(p, half + i) = static_cast<float>(std::sin(angle));
    }
  }
  table.buffer.make_read_only();
  bool is_first = true;
  for (const auto& kernel : runnable<RotaryFn>(kManifest, "rotary_rows")) {
    const std::string note = std::string(kernel.name) + " heads=" + std::to_string(heads) +
                             " head_dim=" + std::to_string(head_dim) + " rest=" + std::to_string(rest);
    GuardedMatrix<float> out(kRows, cols, cols + 5);
    for (int64_t row = kFirst; row < kRows; ++row) std::copy_n(x.row(row), cols, out.row(row));
    RotaryArgs args;
    args.heads = heads;
    args.head_dim = head_dim;
    args.x = out.data();
    args.x_stride = out.stride;
    args.table = table.data();
    args.first = kFirst;
    kernel.fn(args, kFirst, 4);
    kernel.fn(args, 4, kRows);
    CHECK(out.check_gaps() && out.untouched(0, 0, cols) && out.untouched(1, 0, cols), note);
    for (int64_t row = kFirst; row < kRows; ++row) {
      if (is_first) std::copy_n(out.row(row), cols, first.row(row));
      CHECK_SAME_BITS(first.row(row), out.row(row), static_cast<size_t>(cols), note, " row ", row);
      CHECK_SAME_BITS(x.row(row) + turned, out.row(row) + turned, static_cast<size_t>(rest), note);
      const float* angles = table.row(row - kFirst);
      for (int64_t col = 0; col < turned; ++col) {
        const int64_t head = col / head_dim * head_dim, pair = (col - head) % half;
        const bool second = col - head >= half;
        const double a = x.at(row, head + pair), b = x.at(row, head + half + pair);
        const double cos = angles[pair], sin = angles[half + pair];
        const double want = second ? b * cos + a * sin : a * cos - b * sin;
        // The product that is rounded on its own, and the sum.
        const double bound = kEpsilonF32 * (std::abs(second ? a * sin : a * cos) + std::abs(want));
        CHECK_LE(std::abs(out.at(row, col) - want), 1.001 * bound + 1e-44, note, " row ", row, " column ",
                 col);
      }
    }
    is_first = false;
  }
}

}  // namespace

ENCAST_TEST(every_head_dim) {
  Rng rng;
  for (int64_t head_dim = 2; head_dim <= 132; head_dim += 2) {
    check_shape(1 + head_dim % 3, head_dim, head_dim % 5 * 7, rng);
  }
}

ENCAST_TEST(heads_of_models) {
  Rng rng(1);
  for (const int64_t head_dim : {32, 64, 128, 256}) check_shape(24, head_dim, 12 * head_dim, rng);
}

ENCAST_TEST_MAIN
