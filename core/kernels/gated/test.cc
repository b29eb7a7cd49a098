#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "kernels/gated/gated.h"
#include "kernels/quantize/reference.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"
#include "testing/tolerance.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/gated/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/gated/kernels.inc"
#undef ENCAST_KERNEL
};

constexpr Activation kActivations[] = {Activation::gelu, Activation::gelu_tanh, Activation::relu,
                                       Activation::silu, Activation::tanh};

double activated(Activation kind, double x) {
  switch (kind) {
    case Activation::gelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::tanh:
      return std::tanh(x);
    case Activation::none:
      break;
  }
  return x;
}

// The activation's error (the table of core/simd/README.md; exact ones are rounded once) times the other
// half, and one rounding of the product.
double bound(bool exact, double value, double other) {
  const double own =
      exact ? kEpsilonF32 * std::abs(value) * 1.001 + 1e-14 : 5e-7 + 8 * kEpsilonF32 * std::abs(value);
  return own * std::abs(other) + 1.001 * kEpsilonF32 * std::abs(value * other);
}

void check_shape(int64_t rows, int64_t cols, Activation kind, bool exact, NarrowOut::Kind narrow_kind,
                 Rng& rng) {
  GuardedMatrix<float> x(rows, 2 * cols, 2 * cols + 3), first(rows, cols);
  rng.fill_normal(x.buffer.span(), 0.0f, 2.0f);
  x.buffer.make_read_only();
  bool is_first = true;
  for (const auto& kernel : runnable<GatedFn>(kManifest, "gated_rows")) {
    const std::string note = std::string(kernel.name) + " cols=" + std::to_string(cols) +
                             " activation=" + std::to_string(static_cast<int>(kind)) +
                             " exact=" + std::to_string(exact) +
                             " narrow=" + std::to_string(static_cast<int>(narrow_kind));
    GuardedMatrix<float> out(rows, cols, cols + 4);
    NarrowBuffers narrow(narrow_kind, rows, cols, (cols + 63) / 64 * 64 + 64);
    GatedArgs args;
    args.cols = cols;
    args.x = x.data();
    args.x_stride = x.stride;
    args.activation = kind;
    args.exact = exact;
    args.out = out.data();
    args.out_stride = out.stride;
    args.narrow = narrow.out();
    kernel.fn(args, 0, 1);
    kernel.fn(args, 1, rows);
    CHECK(out.check_gaps() && narrow.check_gaps(), note);
    for (int64_t i = 0; i < rows; ++i) {
      if (is_first) std::copy_n(out.row(i), cols, first.row(i));
      CHECK_SAME_BITS(first.row(i), out.row(i), static_cast<size_t>(cols), note, " row ", i);
      narrow.check_row(i, out.row(i), cols, note);
      for (int64_t j = 0; j < cols; ++j) {
        const double value = activated(kind, static_cast<double>(x.at(i, j)));
        const double other = x.at(i, cols + j);
        CHECK_LE(std::abs(out.at(i, j) - value * other), bound(exact, value, other), note, " row ", i,
                 " column ", j);
      }
    }
    is_first = false;
  }
}

}  // namespace

ENCAST_TEST(every_width) {
  Rng rng;
  for (int64_t cols = 1; cols <= 130; ++cols) {
    const Activation kind = kActivations[cols % 5];
    check_shape(2, cols, kind, cols % 2 == 0, kNarrowKinds[cols % 3 == 0 ? 2 : 0], rng);
  }
}

ENCAST_TEST(every_activation_and_form) {
  Rng rng(1);
  for (const Activation kind : kActivations) {
    for (const bool exact : {false, true}) {
      for (const NarrowOut::Kind narrow : kNarrowKinds) {
        for (const int64_t cols : {33, 100, 1152}) check_shape(3, cols, kind, exact, narrow, rng);
      }
    }
  }
}

ENCAST_TEST_MAIN
