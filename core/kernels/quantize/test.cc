#include <limits>

#include "kernels/quantize/quantize.h"
#include "kernels/quantize/reference.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/quantize/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/quantize/kernels.inc"
#undef ENCAST_KERNEL
};

NarrowArgs args_for(const GuardedMatrix<float>& x, NarrowBuffers& buffers) {
  NarrowArgs args;
  args.cols = x.cols;
  args.x = x.data();
  args.x_stride = x.stride;
  args.out = buffers.out();
  return args;
}

void check_shape(int64_t rows, int64_t cols, Rng& rng) {
  GuardedMatrix<float> x(rows, cols, cols + 3);
  for (int64_t i = 0; i < rows; ++i) {
    // Rows of both signs, of one sign only, and of very different sizes.
    const float size = std::exp2(static_cast<float>(rng.integer(-20, 20)));
    const float low = i % 3 == 1 ? 0.0f : -size, high = i % 3 == 2 ? 0.0f : size;
    for (int64_t j = 0; j < cols; ++j) x.at(i, j) = rng.uniform(low, high);
  }
  x.buffer.make_read_only();
  for (const NarrowOut::Kind kind : kNarrowKinds) {
    for (const auto& kernel : runnable<NarrowFn>(kManifest, "narrow_rows")) {
      const std::string note = std::string(kernel.name) + " cols=" + std::to_string(cols) +
                               " kind=" + std::to_string(static_cast<int>(kind));
      NarrowBuffers buffers(kind, rows, cols, (cols + 63) / 64 * 64 + 64);
      const NarrowArgs args = args_for(x, buffers);
      kernel.fn(args, 0, 1);
      kernel.fn(args, 1, rows);
      for (int64_t i = 0; i < rows; ++i) buffers.check_row(i, x.row(i), cols, note);
      CHECK(buffers.check_gaps(), note);
    }
  }
}

}  // namespace

// Both extremes lie between two codes, and both round away from zero: one code too many, which must not wrap.
ENCAST_TEST(the_largest_code_is_the_last) {
  constexpr int64_t kCols = 64 + 16 + 3;
  GuardedMatrix<float> x(1, kCols, kCols);
  for (int64_t j = 0; j < kCols; ++j) x.at(0, j) = j % 2 == 0 ? 101.5f : -153.5f;
  for (const auto& kernel : runnable<NarrowFn>(kManifest, "narrow_rows")) {
    NarrowBuffers buffers(NarrowOut::Kind::q8_zero_point, 1, kCols, 128);
    const NarrowArgs args = args_for(x, buffers);
    kernel.fn(args, 0, 1);
    CHECK_EQ(args.out.zero[0], 154);
    for (int64_t j = 0; j < kCols; ++j) {
      CHECK_EQ(int{static_cast<const uint8_t*>(args.out.data)[j]}, j % 2 == 0 ? 255 : 0);
    }
    buffers.check_row(0, x.row(0), kCols, kernel.name);
  }
}

ENCAST_TEST(every_width_equals_the_formula) {
  Rng rng;
  for (int64_t cols = 1; cols <= 130; ++cols) check_shape(4, cols, rng);
  for (int64_t cols : {312, 384, 768, 1024, 3072}) check_shape(3, cols, rng);
}

ENCAST_TEST(rows_of_zeros_and_of_almost_zeros) {
  constexpr int64_t kCols = 70;
  GuardedMatrix<float> x(4, kCols, kCols);
  const float values[] = {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), 1e-37f};
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < kCols; ++j) x.at(i, j) = j % 2 == 0 ? values[i] : -values[i];
  }
  for (const NarrowOut::Kind kind : {NarrowOut::Kind::q8_symmetric, NarrowOut::Kind::q8_zero_point}) {
    for (const auto& kernel : runnable<NarrowFn>(kManifest, "narrow_rows")) {
      NarrowBuffers buffers(kind, 4, kCols, 128);
      kernel.fn(args_for(x, buffers), 0, 4);
      for (int64_t i = 0; i < 4; ++i) {
        buffers.check_row(i, x.row(i), kCols, kernel.name);
        CHECK_EQ(buffers.scale[static_cast<size_t>(i)], 0.0f, kernel.name, " row ", i);
      }
    }
  }
}

ENCAST_TEST(a_nan_anywhere_poisons_the_scale) {
  constexpr int64_t kCols = 70;
  for (const NarrowOut::Kind kind :
       {NarrowOut::Kind::q8_symmetric, NarrowOut::Kind::q8_zero_point, NarrowOut::Kind::q8_fixed}) {
    for (const auto& kernel : runnable<NarrowFn>(kManifest, "narrow_rows")) {
      for (int64_t at = 0; at < kCols; ++at) {
        for (const float sign : {1.0f, -1.0f}) {
          GuardedMatrix<float> x(1, kCols, kCols);
          for (int64_t j = 0; j < kCols; ++j) x.at(0, j) = static_cast<float>(j - 20);
          x.at(0, at) = std::copysign(std::numeric_limits<float>::quiet_NaN(), sign);
          NarrowBuffers buffers(kind, 1, kCols, 128);
          kernel.fn(args_for(x, buffers), 0, 1);
          CHECK(std::isnan(buffers.scale[0]), kernel.name, " at ", at);
          CHECK(buffers.zero[0] >= 0 && buffers.zero[0] <= 255, kernel.name, " zero ", buffers.zero[0]);
        }
      }
    }
  }
}

// Beyond 2^31 steps no integer holds an element; infinities are none that a byte could stand for either.
ENCAST_TEST(a_fixed_range_saturates) {
  constexpr int64_t kCols = 64 + 16 + 3;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float size : {200 * kFixedScale, 1e6f, 1e12f, std::numeric_limits<float>::max(), kInfinity}) {
    GuardedMatrix<float> x(1, kCols, kCols);
    for (int64_t j = 0; j < kCols; ++j) x.at(0, j) = j % 3 == 0 ? size : j % 3 == 1 ? -size : kFixedScale;
    for (const auto& kernel : runnable<NarrowFn>(kManifest, "narrow_rows")) {
      NarrowBuffers buffers(NarrowOut::Kind::q8_fixed, 1, kCols, 128);
      kernel.fn(args_for(x, buffers), 0, 1);
      for (int64_t j = 0; j < kCols; ++j) {
        const int want = j % 3 == 0 ? 255 : j % 3 == 1 ? 0 : kFixedZero + 1;
        CHECK_EQ(int{buffers.bytes.at(0, j)}, want, kernel.name, " ", size, " column ", j);
      }
      CHECK_EQ(buffers.scale[0], kFixedScale, kernel.name);
      CHECK_EQ(buffers.zero[0], kFixedZero, kernel.name);
    }
  }
}

// Ties between two bytes are where a level that rounds differently would show.
ENCAST_TEST(ties_go_to_even) {
  constexpr int64_t kCols = 64;
  GuardedMatrix<float> x(1, kCols, kCols);
  for (int64_t j = 0; j < kCols; ++j) x.at(0, j) = static_cast<float>(j) + 0.5f;
  x.at(0, 63) = 127.0f;  // scale 1
  for (const auto& kernel : runnable<NarrowFn>(kManifest, "narrow_rows")) {
    NarrowBuffers buffers(NarrowOut::Kind::q8_symmetric, 1, kCols, 64);
    kernel.fn(args_for(x, buffers), 0, 1);
    for (int64_t j = 0; j < 63; ++j)
      CHECK_EQ(buffers.bytes.at(0, j), 128 + (j + 1) / 2 * 2, kernel.name, " ", j);
    CHECK_EQ(buffers.scale[0], 1.0f);
  }
}

ENCAST_TEST_MAIN
