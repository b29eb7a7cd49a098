#include "kernels/elementwise/elementwise.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"
#include "testing/tolerance.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/elementwise/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/elementwise/kernels.inc"
#undef ENCAST_KERNEL
};

constexpr Activation kActivations[] = {Activation::none, Activation::gelu, Activation::gelu_tanh,
                                       Activation::relu, Activation::silu, Activation::tanh};

double reference(Activation kind, double x) {
  switch (kind) {
    case Activation::none:
      return x;
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
  }
  return x;
}

// Fast forms: the table of core/simd/README.md. Exact ones are rounded once (gelu_tanh's reference cancels
// for negative x, in double).
double bound(bool exact, double value) {
  return exact ? kEpsilonF32 * std::abs(value) * 1.001 + 1e-14 : 5e-7 + 8 * kEpsilonF32 * std::abs(value);
}

void check_shape(int64_t rows, int64_t cols, bool with_other, float factor, Rng& rng) {
  GuardedMatrix<float> x(rows, cols, cols + 1), other(rows, cols, cols + 2);
  rng.fill_normal(x.buffer.span(), 0.0f, 2.0f);
  rng.fill_normal(other.buffer.span(), 0.0f, 1.0f);
  x.buffer.make_read_only();
  other.buffer.make_read_only();
  for (const Activation kind : kActivations) {
    for (const bool exact : {false, true}) {
      GuardedMatrix<float> first(rows, cols);
      bool is_first = true;
      for (const auto& kernel : runnable<ElementwiseFn>(kManifest, "elementwise_rows")) {
        const std::string note = std::string(kernel.name) + " cols=" + std::to_string(cols) +
                                 " activation=" + std::to_string(static_cast<int>(kind)) +
                                 " exact=" + std::to_string(exact);
        GuardedMatrix<float> out(rows, cols, cols + 4);
        ElementwiseArgs args;
        args.cols = cols;
        args.x = x.data();
        args.x_stride = x.stride;
        args.other = with_other ? other.data() : nullptr;
        args.other_stride = other.stride;
        args.factor = factor;
        args.activation = kind;
        args.exact = exact;
        args.out = out.data();
        args.out_stride = out.stride;
        kernel.fn(args, 0, 1);
        kernel.fn(args, 1, rows);
        CHECK(out.check_gaps(), note);
        for (int64_t i = 0; i < rows; ++i) {
          if (is_first) std::copy_n(out.row(i), cols, first.row(i));
          CHECK_SAME_BITS(first.row(i), out.row(i), static_cast<size_t>(cols), note, " row ", i);
          for (int64_t j = 0; j < cols; ++j) {
            float input = factor * x.at(i, j);
            if (with_other) input += other.at(i, j);
            const double want = reference(kind, static_cast<double>(input));
            CHECK_LE(std::abs(out.at(i, j) - want), bound(exact || kind == Activation::none, want), note,
                     " of ", input);
          }
        }
        is_first = false;
      }
    }
  }
}

}  // namespace

ENCAST_TEST(every_width_and_activation) {
  Rng rng;
  for (int64_t cols = 1; cols <= 130; ++cols)
    check_shape(2, cols, cols % 2 == 0, cols % 3 == 0 ? 1.0f : 0.37f, rng);
  for (int64_t cols : {312, 384, 3072}) check_shape(2, cols, true, 1.0f, rng);
}

ENCAST_TEST(out_may_be_an_operand) {
  constexpr int64_t kCols = 77;
  Rng rng(1);
  GuardedMatrix<float> x(2, kCols), other(2, kCols), apart(2, kCols);
  rng.fill_normal(x.buffer.span());
  rng.fill_normal(other.buffer.span());
  for (const auto& kernel : runnable<ElementwiseFn>(kManifest, "elementwise_rows")) {
    ElementwiseArgs args;
    args.cols = kCols;
    args.x = x.data();
    args.other = other.data();
    args.out = apart.data();
    args.x_stride = args.other_stride = args.out_stride = kCols;
    args.activation = Activation::gelu;
    kernel.fn(args, 0, 2);
    for (const bool is_x : {true, false}) {
      GuardedMatrix<float> both(2, kCols);
      std::copy_n((is_x ? x : other).data(), both.buffer.size(), both.data());
      ElementwiseArgs in_place = args;
      (is_x ? in_place.x : in_place.other) = both.data();
      in_place.out = both.data();
      kernel.fn(in_place, 0, 2);
      CHECK_SAME_BITS(apart.data(), both.data(), both.buffer.size(), kernel.name, " x ", is_x);
    }
  }
}

ENCAST_TEST_MAIN
