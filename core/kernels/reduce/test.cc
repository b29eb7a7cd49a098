#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/reduce/reduce.h"
#include "testing/check.h"
#include "testing/kernels.h"
#include "testing/random.h"
#include "testing/tolerance.h"

using namespace encast;
using namespace encast::testing;

namespace encast {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
#include "kernels/reduce/kernels.inc"
#undef ENCAST_KERNEL
}  // namespace encast

namespace {

const ManifestRow kManifest[] = {
#define ENCAST_KERNEL ENCAST_KERNEL_ROW
#include "kernels/reduce/kernels.inc"
#undef ENCAST_KERNEL
};

constexpr Pooling kModes[] = {Pooling::cls,          Pooling::max,
                              Pooling::mean,         Pooling::mean_sqrt_len_tokens,
                              Pooling::weightedmean, Pooling::lasttoken};

struct Pooled {
  double value, bound;
};

Pooled reference_pool(Pooling mode, const GuardedMatrix<float>& x, int64_t begin, int64_t end, int64_t col) {
  const int64_t length = end - begin;
  const double n = static_cast<double>(length);
  double sum = 0, weighted = 0, magnitude = 0, weighted_magnitude = 0;
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t t = begin; t < end; ++t) {
    const double value = x.at(t, col), weight = static_cast<double>(t - begin + 1);
    sum += value;
    weighted += value * weight;
    magnitude += std::abs(value);
    weighted_magnitude += std::abs(value) * weight;
    largest = std::max(largest, value);
  }
  switch (mode) {
    case Pooling::cls:
      return {x.at(begin, col), 0};
    case Pooling::lasttoken:
      return {x.at(end - 1, col), 0};
    case Pooling::max:
      return {largest, 0};
    case Pooling::mean:
      return {sum / n, gamma_bound(length) * magnitude / n};
    case Pooling::mean_sqrt_len_tokens:
      return {sum / std::sqrt(n), gamma_bound(length + 1) * magnitude / std::sqrt(n)};
    case Pooling::weightedmean: {
      const double weights = n * (n + 1) / 2;
      return {weighted / weights, gamma_bound(length + 2) * weighted_magnitude / weights};
    }
  }
  return {0, 0};
}

void check_pool(int64_t cols, const std::vector<int32_t>& lengths, Rng& rng) {
  const int64_t seqs = static_cast<int64_t>(lengths.size());
  GuardedBuffer<int32_t> cu(lengths.size() + 1);
  cu[0] = 0;
  for (size_t s = 0; s < lengths.size(); ++s) cu[s + 1] = cu[s] + lengths[s];
  GuardedMatrix<float> x(cu[lengths.size()], cols, cols + 1);
  rng.fill_normal(x.buffer.span(), -1.0f, 2.0f);
  x.buffer.make_read_only();
  for (const Pooling mode : kModes) {
    GuardedMatrix<float> first(seqs, cols);
    bool is_first = true;
    for (const auto& kernel : runnable<PoolFn>(kManifest, "pool_rows")) {
      const std::string note = std::string(kernel.name) + " cols=" + std::to_string(cols) +
                               " mode=" + std::to_string(static_cast<int>(mode));
      GuardedMatrix<float> out(seqs, cols, 3 * cols + 2);  // modes lie side by side
      PoolArgs args;
      args.cols = cols;
      args.x = x.data();
      args.x_stride = x.stride;
      args.cu_seqlens = cu.data();
      args.mode = mode;
      args.out = out.data();
      args.out_stride = out.stride;
      kernel.fn(args, 0, 1);
      kernel.fn(args, 1, seqs);
      CHECK(out.check_gaps(), note);
      for (int64_t s = 0; s < seqs; ++s) {
        if (is_first) std::copy_n(out.row(s), cols, first.row(s));
        CHECK_SAME_BITS(first.row(s), out.row(s), static_cast<size_t>(cols), note, " seq ", s);
        const size_t index = static_cast<size_t>(s);
        for (int64_t j = 0; j < cols; ++j) {
          const Pooled want = reference_pool(mode, x, cu[index], cu[index + 1], j);
          CHECK_LE(std::abs(out.at(s, j) - want.value), want.bound, note, " seq ", s, " column ", j);
        }
      }
      is_first = false;
    }
  }
}

}  // namespace

ENCAST_TEST(pooling_every_width_and_mode) {
  Rng rng;
  for (int64_t cols = 1; cols <= 130; ++cols) check_pool(cols, {3, 1, 7}, rng);
  check_pool(384, {1, 2, 16, 33, 128, 511}, rng);
}

// A mode must not look beyond its sequence: the neighbours' values are poison.
ENCAST_TEST(pooling_ignores_neighbours) {
  constexpr int64_t kCols = 40;
  const int32_t cu[] = {0, 3, 8, 9};
  GuardedMatrix<float> x(9, kCols);
  std::fill(x.buffer.begin(), x.buffer.end(), std::numeric_limits<float>::quiet_NaN());
  for (int64_t t = 3; t < 8; ++t) std::fill_n(x.row(t), kCols, 2.0f);
  for (const Pooling mode : kModes) {
    for (const auto& kernel : runnable<PoolFn>(kManifest, "pool_rows")) {
      GuardedMatrix<float> out(3, kCols);
      PoolArgs args;
      args.cols = kCols;
      args.x = x.data();
      args.x_stride = kCols;
      args.cu_seqlens = cu;
      args.mode = mode;
      args.out = out.data();
      args.out_stride = kCols;
      kernel.fn(args, 0, 3);
      const float want = mode == Pooling::mean_sqrt_len_tokens ? 10.0f / std::sqrt(5.0f) : 2.0f;
      for (int64_t j = 0; j < kCols; ++j) {
        CHECK_EQ(out.at(1, j), want, kernel.name, " mode ", static_cast<int>(mode));
        CHECK(std::isnan(out.at(0, j)) && std::isnan(out.at(2, j)), kernel.name, " hides a NaN");
      }
    }
  }
}

ENCAST_TEST(max_pooling_keeps_a_nan) {
  constexpr int64_t kCols = 20;
  const int32_t cu[] = {0, 4};
  for (int64_t at = 0; at < 4; ++at) {
    GuardedMatrix<float> x(4, kCols), out(1, kCols);
    std::fill(x.buffer.begin(), x.buffer.end(), 1.0f);
    x.at(at, 17) = std::numeric_limits<float>::quiet_NaN();
    for (const auto& kernel : runnable<PoolFn>(kManifest, "pool_rows")) {
      PoolArgs args;
      args.cols = args.x_stride = args.out_stride = kCols;
      args.x = x.data();
      args.cu_seqlens = cu;
      args.mode = Pooling::max;
      args.out = out.data();
      kernel.fn(args, 0, 1);
      CHECK(std::isnan(out.at(0, 17)) && out.at(0, 16) == 1.0f, kernel.name, " token ", at);
    }
  }
}

ENCAST_TEST(gathering_copies_rows) {
  Rng rng(1);
  for (int64_t cols = 1; cols <= 130; ++cols) {
    GuardedMatrix<float> x(9, cols, cols + 1);
    rng.fill_normal(x.buffer.span());
    const std::vector<int32_t> rows = {8, 0, 3, 3, 7};
    for (const auto& kernel : runnable<GatherFn>(kManifest, "gather_rows")) {
      GuardedMatrix<float> out(5, cols, cols + 3);
      GatherArgs args;
      args.cols = cols;
      args.x = x.data();
      args.x_stride = x.stride;
      args.rows = rows.data();
      args.out = out.data();
      args.out_stride = out.stride;
      kernel.fn(args, 0, 2);
      kernel.fn(args, 2, 5);
      CHECK(out.check_gaps(), kernel.name);
      for (int64_t i = 0; i < 5; ++i) {
        CHECK_SAME_BITS(x.row(rows[static_cast<size_t>(i)]), out.row(i), static_cast<size_t>(cols),
                        kernel.name);
      }
    }
  }
}

ENCAST_TEST(normalised_rows_have_length_one) {
  Rng rng(2);
  std::vector<int64_t> widths = {384, 768};
  for (int64_t cols = 1; cols <= 130; ++cols) widths.push_back(cols);
  for (const int64_t cols : widths) {
    GuardedMatrix<float> x(3, cols, cols + 2), first(3, cols);
    rng.fill_normal(x.buffer.span(), 0.5f, 3.0f);
    bool is_first = true;
    for (const auto& kernel : runnable<NormalizeFn>(kManifest, "normalize_rows")) {
      GuardedMatrix<float> out(3, cols, cols + 5);
      NormalizeArgs args;
      args.cols = cols;
      args.x = x.data();
      args.x_stride = x.stride;
      args.out = out.data();
      args.out_stride = out.stride;
      kernel.fn(args, 0, 1);
      kernel.fn(args, 1, 3);
      CHECK(out.check_gaps(), kernel.name);
      for (int64_t i = 0; i < 3; ++i) {
        if (is_first) std::copy_n(out.row(i), cols, first.row(i));
        CHECK_SAME_BITS(first.row(i), out.row(i), static_cast<size_t>(cols), kernel.name, " cols=", cols);
        double squares = 0;
        for (int64_t j = 0; j < cols; ++j) squares += std::pow(static_cast<double>(x.at(i, j)), 2);
        for (int64_t j = 0; j < cols; ++j) {
          const double want = x.at(i, j) / std::sqrt(squares);
          CHECK_LE(std::abs(out.at(i, j) - want), gamma_bound(cols / 2 + 3) * std::abs(want), kernel.name,
                   " cols=", cols);
        }
        std::vector<float> in_place(x.row(i), x.row(i) + cols);
        NormalizeArgs same = args;
        same.x = same.out = in_place.data();
        kernel.fn(same, 0, 1);
        CHECK_SAME_BITS(out.row(i), in_place.data(), in_place.size(), kernel.name, " in place");
      }
      is_first = false;
    }
  }
}

ENCAST_TEST(a_row_of_zeros_stays_zero) {
  GuardedMatrix<float> x(1, 50), out(1, 50);
  std::fill(x.buffer.begin(), x.buffer.end(), 0.0f);
  x.at(0, 7) = 1e-13f;  // shorter than the floor of 1e-12
  for (const auto& kernel : runnable<NormalizeFn>(kManifest, "normalize_rows")) {
    NormalizeArgs args;
    args.cols = args.x_stride = args.out_stride = 50;
    args.x = x.data();
    args.out = out.data();
    kernel.fn(args, 0, 1);
    for (int64_t j = 0; j < 50; ++j) CHECK_EQ(out.at(0, j), j == 7 ? 1e-13f / 1e-12f : 0.0f, kernel.name);
  }
}

ENCAST_TEST_MAIN
