#include "kernels/norm/norm.h"

#include "kernels/norm/reference.h"
#include "kernels/quantize/reference.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/norm/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/norm/kernels.inc"
#undef ENCAST_KERNEL
};

struct Problem {
  Problem(int64_t rows, int64_t cols, Rng& rng)
      : x(rows, cols, cols + 5),
        residual(rows, cols, cols + 7),
        gamma(static_cast<size_t>(cols)),
        beta(static_cast<size_t>(cols)) {
    for (int64_t i = 0; i < rows; ++i) {
      // Means away from zero and sizes far apart: a row whose mean was left out must show.
      const float size = std::exp2(static_cast<float>(rng.integer(-6, 6)));
      const float mean = rng.uniform(-4.0f, 4.0f) * size;
      rng.fill_normal({x.row(i), static_cast<size_t>(cols)}, mean, size);
      rng.fill_normal({residual.row(i), static_cast<size_t>(cols)}, mean, size);
      x.at(i, rng.integer(0, cols - 1)) *= 30;  // an outlier channel
    }
    rng.fill_normal(gamma.span(), 1.0f, 0.3f);
    rng.fill_normal(beta.span(), 0.0f, 0.5f);
    x.buffer.make_read_only();
    residual.buffer.make_read_only();
    gamma.make_read_only();
    beta.make_read_only();
  }

  NormArgs args(GuardedMatrix<float>& out, bool with_residual, bool centred = true) const {
    NormArgs args;
    args.cols = x.cols;
    args.x = x.data();
    args.x_stride = x.stride;
    args.residual = with_residual ? residual.data() : nullptr;
    args.residual_stride = residual.stride;
    args.gamma = gamma.data();
    args.beta = centred ? beta.data() : nullptr;
    args.eps = 1e-5f;
    args.out = out.data();
    args.out_stride = out.stride;
    return args;
  }

  ReferenceNorm expected(int64_t row, bool with_residual, bool centred) const {
    std::vector<double> sum(static_cast<size_t>(x.cols)), error(sum.size(), 0.0);
    for (size_t j = 0; j < sum.size(); ++j) {
      const int64_t col = static_cast<int64_t>(j);
      sum[j] = x.at(row, col);
      if (with_residual) {
        sum[j] += residual.at(row, col);
        error[j] = kEpsilonF32 * std::abs(sum[j]);
      }
    }
    if (!centred) return reference_rms_norm(sum, error, gamma.data(), static_cast<double>(1e-5f));
    return reference_norm(sum, error, gamma.data(), beta.data(), static_cast<double>(1e-5f));
  }

  GuardedMatrix<float> x, residual;
  GuardedBuffer<float> gamma, beta;
};

void check_shape(int64_t rows, int64_t cols, bool centred, Rng& rng) {
  const Problem problem(rows, cols, rng);
  for (const bool with_residual : {false, true}) {
    for (const NarrowOut::Kind kind : kNarrowKinds) {
      GuardedMatrix<float> first(rows, cols, cols);
      bool is_first = true;
      for (const auto& kernel : runnable<NormFn>(kManifest, "norm_rows")) {
        const std::string note = std::string(kernel.name) + " cols=" + std::to_string(cols) +
                                 " centred=" + std::to_string(centred) +
                                 " residual=" + std::to_string(with_residual) +
                                 " kind=" + std::to_string(static_cast<int>(kind));
        GuardedMatrix<float> out(rows, cols, cols + 2);
        NarrowBuffers narrow(kind, rows, cols, (cols + 63) / 64 * 64 + 64);
        NormArgs args = problem.args(out, with_residual, centred);
        args.narrow = narrow.out();
        kernel.fn(args, 0, rows / 2);
        kernel.fn(args, rows / 2, rows);
        CHECK(out.check_gaps() && narrow.check_gaps(), note);
        for (int64_t i = 0; i < rows; ++i) {
          if (is_first) std::copy_n(out.row(i), cols, first.row(i));
          CHECK_SAME_BITS(first.row(i), out.row(i), static_cast<size_t>(cols), note, " row ", i);
          narrow.check_row(i, out.row(i), cols, note);
          const ReferenceNorm want = problem.expected(i, with_residual, centred);
          for (size_t j = 0; j < want.value.size(); ++j) {
            CHECK_LE(std::abs(out.at(i, static_cast<int64_t>(j)) - want.value[j]), want.bound[j], note,
                     " row ", i, " column ", j);
          }
        }
        is_first = false;
      }
    }
  }
}

}  // namespace

ENCAST_TEST(every_width_stays_within_the_bound) {
  Rng rng;
  for (const bool centred : {true, false}) {
    for (int64_t cols = 1; cols <= 130; ++cols) check_shape(3, cols, centred, rng);
    for (int64_t cols : {312, 384, 768, 1024}) check_shape(4, cols, centred, rng);
  }
}

// Some kernels take the passes of four rows together where rows are many and widths are whole lines.
ENCAST_TEST(many_rows_stay_within_the_bound) {
  Rng rng(3);
  for (const int64_t rows : {11, 12, 13, 14, 15, 16, 17, 40}) {
    for (const int64_t cols : {64, 128, 384, 400, 768}) check_shape(rows, cols, rng.coin(), rng);
  }
  check_shape(12, 4096, true, rng);
  check_shape(12, 4160, true, rng);
}

void check_out_as_operand(int64_t rows, int64_t cols) {
  Rng rng(1);
  const Problem problem(rows, cols, rng);
  for (const auto& kernel : runnable<NormFn>(kManifest, "norm_rows")) {
    for (const int which : {0, 1, 2, 3}) {
      const bool is_x = (which & 1) != 0, centred = (which & 2) != 0;
      GuardedMatrix<float> apart(rows, cols, cols);
      NarrowBuffers codes(NarrowOut::Kind::q8_zero_point, rows, cols, (cols + 63) / 64 * 64);
      NormArgs whole = problem.args(apart, true, centred);
      whole.narrow = codes.out();
      kernel.fn(whole, 0, rows);
      const GuardedMatrix<float>& source = is_x ? problem.x : problem.residual;
      GuardedMatrix<float> both(rows, cols, cols);
      for (int64_t i = 0; i < rows; ++i) std::copy_n(source.row(i), cols, both.row(i));
      NormArgs args = problem.args(both, true, centred);
      (is_x ? args.x : args.residual) = both.data();
      (is_x ? args.x_stride : args.residual_stride) = both.stride;
      NarrowBuffers own(NarrowOut::Kind::q8_zero_point, rows, cols, (cols + 63) / 64 * 64);
      args.narrow = own.out();
      kernel.fn(args, 0, rows);
      CHECK_SAME_BITS(apart.data(), both.data(), apart.buffer.size(), kernel.name, " x ", is_x);
      for (int64_t i = 0; i < rows; ++i) own.check_row(i, both.row(i), cols, kernel.name);
    }
  }
}

ENCAST_TEST(out_may_be_an_operand) {
  check_out_as_operand(5, 100);
  check_out_as_operand(20, 128);
}

ENCAST_TEST(only_the_asked_rows_are_written) {
  Rng rng(2);
  for (const auto& [rows, cols, begin, end] : {std::array<int64_t, 4>{5, 33, 1, 3}, {20, 64, 2, 18}}) {
    const Problem problem(rows, cols, rng);
    for (const auto& kernel : runnable<NormFn>(kManifest, "norm_rows")) {
      GuardedMatrix<float> out(rows, cols, cols);
      NarrowBuffers narrow(NarrowOut::Kind::q8_zero_point, rows, cols, (cols + 63) / 64 * 64);
      NormArgs args = problem.args(out, true);
      args.narrow = narrow.out();
      kernel.fn(args, begin, end);
      for (int64_t i = 0; i < rows; ++i) {
        CHECK_EQ(out.untouched(i, 0, cols), i < begin || i >= end, kernel.name, " row ", i);
      }
    }
  }
}

// Of zeros the root mean square is that of eps: zeros, not NaN, also where narrow copies are made.
ENCAST_TEST(rows_of_zeros_stay_zeros_by_their_root_mean_square) {
  constexpr int64_t kCols = 70;
  GuardedMatrix<float> x(1, kCols), out(1, kCols), zeros(1, kCols);
  GuardedBuffer<float> gamma(kCols);
  for (int64_t j = 0; j < kCols; ++j) {
    x.at(0, j) = zeros.at(0, j) = 0.0f;
    gamma[static_cast<size_t>(j)] = 2.0f;
  }
  for (const auto& kernel : runnable<NormFn>(kManifest, "norm_rows")) {
    for (const NarrowOut::Kind kind : kNarrowKinds) {
      NarrowBuffers narrow(kind, 1, kCols, 128);
      NormArgs args;
      args.cols = kCols;
      args.x = x.data();
      args.gamma = gamma.data();
      args.eps = 1e-12f;
      args.out = out.data();
      args.out_stride = kCols;
      args.narrow = narrow.out();
      kernel.fn(args, 0, 1);
      CHECK_SAME_BITS(out.data(), zeros.data(), size_t{kCols}, kernel.name);
      narrow.check_row(0, out.row(0), kCols, kernel.name);
    }
  }
}

// A constant row has variance 0: the answer is beta, not NaN.
ENCAST_TEST(constant_rows_give_beta) {
  constexpr int64_t kCols = 384;
  GuardedMatrix<float> x(1, kCols), out(1, kCols);
  GuardedBuffer<float> gamma(kCols), beta(kCols);
  for (size_t j = 0; j < kCols; ++j) {
    x.at(0, static_cast<int64_t>(j)) = 3.0f;
    gamma[j] = 2.0f;
    beta[j] = static_cast<float>(j);
  }
  for (const auto& kernel : runnable<NormFn>(kManifest, "norm_rows")) {
    NormArgs args;
    args.cols = kCols;
    args.x = x.data();
    args.gamma = gamma.data();
    args.beta = beta.data();
    args.eps = 1e-12f;
    args.out = out.data();
    kernel.fn(args, 0, 1);
    CHECK_SAME_BITS(out.data(), beta.data(), kCols, kernel.name);
  }
}

// What a vector holds behind the last column must not reach the scale of the row: there mean / deviation may
// overflow where the row itself does not.
ENCAST_TEST(lanes_past_a_row_of_huge_values_leave_its_scale_alone) {
  constexpr int64_t kCols = 20;
  GuardedMatrix<float> x(1, kCols), out(1, kCols);
  GuardedBuffer<float> gamma(kCols), beta(kCols);
  for (size_t j = 0; j < kCols; ++j) {
    x.at(0, static_cast<int64_t>(j)) = 0x1p+110f;
    gamma[j] = 2.0f;
    beta[j] = static_cast<float>(j) - 7;
  }
  for (const auto& kernel : runnable<NormFn>(kManifest, "norm_rows")) {
    for (const NarrowOut::Kind kind : kNarrowKinds) {
      NarrowBuffers narrow(kind, 1, kCols, 64);
      NormArgs args;
      args.cols = kCols;
      args.x = x.data();
      args.gamma = gamma.data();
      args.beta = beta.data();
      args.eps = 1e-12f;
      args.out = out.data();
      args.out_stride = kCols;
      args.narrow = narrow.out();
      kernel.fn(args, 0, 1);
      CHECK_SAME_BITS(out.data(), beta.data(), kCols, kernel.name);
      narrow.check_row(0, out.row(0), kCols, kernel.name);
    }
  }
}

ENCAST_TEST_MAIN
