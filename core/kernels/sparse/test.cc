#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "cpu/isa.h"
#include "kernels/catalog.h"
#include "kernels/gemm/reference.h"
#include "kernels/quantize/quantize.h"
#include "kernels/sparse/check.h"
#include "kernels/sparse/pack.h"
#include "simd/activation.h"
#include "testing/check.h"
#include "testing/guard.h"
#include "testing/random.h"

// Every row of the manifest against the dense kernel in plain C++ on the same weights, bit by bit, on
// operands that end at guard pages. A kernel that this machine cannot run is skipped by name.
namespace encast::testing {
namespace {

constexpr float kUntouched = 12345.678f;

const KernelInfo& kernel_named(std::string_view name) {
  for (const KernelInfo& kernel : all_kernels()) {
    if (name == kernel.name) return kernel;
  }
  fail(__FILE__, __LINE__, "no kernel " + std::string(name));
}

void require_runnable(const KernelInfo& kernel) {
  if (isa_allowed(kernel.isa)) return;
  const IsaInfo& level = isa_levels()[static_cast<size_t>(kernel.isa)];
  SKIP_TEST("level ", level.name,
            level.missing.empty() ? " is forbidden by ENCAST_ISA" : " lacks " + level.missing);
}

template <class T>
std::unique_ptr<GuardedBuffer<T>> guarded(const std::vector<T>& values) {
  auto buffer = std::make_unique<GuardedBuffer<T>>(values.size());
  std::copy(values.begin(), values.end(), buffer->begin());
  return buffer;
}

struct Shape {
  int64_t m, n, k;
  double density;  // of columns in a block, 0 to 1
  int8_t all = 0;  // where not 0: of every weight, and every input is 255
};

class Problem {
 public:
  Problem(const Shape& shape, uint64_t seed) : shape_(shape), rng_(seed + 77) {
    const auto [m, n, k, density, all] = shape;
    a_stride_ = round_up(k, kGroupInputs) + kGroupInputs * rng_.integer(0, 2);
    const auto padded = static_cast<size_t>(round_up(n, kPanel));
    a_ = std::make_unique<GuardedBuffer<uint8_t>>(
        static_cast<size_t>((m - 1) * a_stride_ + round_up(k, kGroupInputs)));
    for (uint8_t& x : *a_) x = static_cast<uint8_t>(rng_.integer(0, 255));
    w_.resize(static_cast<size_t>(n * k));
    for (int64_t block = 0; block < n; block += kBlockOutputs) {
      // Blocks of their own densities: empty and full ones among them.
      const double own = rng_.integer(0, 9) == 0 ? static_cast<double>(rng_.integer(0, 1)) : density;
      for (int64_t column = 0; column < k; ++column) {
        if (rng_.uniform(0, 1) >= static_cast<float>(own)) continue;
        for (int64_t output = block; output < std::min(n, block + kBlockOutputs); ++output) {
          w_[static_cast<size_t>(output * k + column)] = static_cast<int8_t>(rng_.integer(-127, 127));
        }
      }
    }
    if (all != 0) {
      std::fill(a_->begin(), a_->end(), uint8_t{255});
      std::fill(w_.begin(), w_.end(), all);
    }
    const int64_t bytes = gemm_packed_bytes(GemmOperands::q8s8, n, k);
    dense_.resize(static_cast<size_t>(bytes) + 64);
    gemm_pack(GemmOperands::q8s8, w_.data(), n, k, dense());
    sparse_ = pack_sparse(w_.data(), n, k);
    values_ = guarded(sparse_.values);
    columns_ = guarded(sparse_.columns);
    starts_ = guarded(sparse_.starts);
    a_scale_.resize(static_cast<size_t>(m));
    a_zero_.resize(static_cast<size_t>(m));
    w_scale_.assign(padded, 0);
    colsum_.assign(padded, 0);
    bias_.assign(padded, 0);
    for (float& scale : a_scale_) scale = rng_.uniform(0.001f, 0.02f);
    for (int32_t& zero : a_zero_) zero = static_cast<int32_t>(rng_.integer(0, 255));
    for (int64_t j = 0; j < n; ++j) {
      const auto at = static_cast<size_t>(j);
      w_scale_[at] = rng_.uniform(0.001f, 0.02f);
      bias_[at] = rng_.normal();
      for (int64_t i = 0; i < k; ++i) colsum_[at] += w_[static_cast<size_t>(j * k + i)];
    }
    residual_.resize(static_cast<size_t>(m * n));
    for (float& x : residual_) x = rng_.normal();
    with_bias_ = rng_.coin();
    with_residual_ = rng_.coin();
    if (rng_.coin()) {
      constexpr Activation kinds[] = {Activation::gelu, Activation::relu, Activation::tanh};
      activation_ = kinds[rng_.integer(0, 2)];
      exact_ = rng_.coin();
      coarse_ = rng_.coin();
    }
  }

  GemmArgs product(float* c, int64_t c_stride) const {
    GemmArgs args{.m = shape_.m, .n = shape_.n, .k = shape_.k, .a = a_->data(), .a_stride = a_stride_};
    args.a_scale = a_scale_.data();
    args.a_zero = a_zero_.data();
    args.w_scale = w_scale_.data();
    args.w_colsum = colsum_.data();
    args.bias = with_bias_ ? bias_.data() : nullptr;
    args.residual = with_residual_ ? residual_.data() : nullptr;
    args.residual_stride = shape_.n;
    args.c = c;
    args.c_stride = c_stride;
    args.activation = activation_;
    args.exact = exact_;
    args.coarse = coarse_;
    return args;
  }

  void spoil_inputs() { std::fill(a_->begin(), a_->end(), uint8_t{99}); }

  // Without what sparse_q8s8_columns does not do; `odd`: with numbers that are none, or far out.
  void keep_to_columns(bool odd) {
    constexpr float kOdd[] = {NAN, -NAN, INFINITY, -INFINITY, -0.0f, 1e-40f};
    for (int i = 0; odd && i < 4; ++i) {
      bias_[static_cast<size_t>(rng_.integer(0, shape_.n - 1))] = kOdd[rng_.integer(0, 5)];
      a_scale_[static_cast<size_t>(rng_.integer(0, shape_.m - 1))] = kOdd[rng_.integer(0, 5)];
    }
    with_bias_ = with_bias_ || odd;
    with_residual_ = exact_ = false;
    activation_ = rng_.coin() ? Activation::none : rng_.coin() ? Activation::gelu : Activation::gelu_tanh;
    coarse_ = activation_ != Activation::none;
  }

  std::vector<float> expected() const {
    std::vector<float> c(static_cast<size_t>(shape_.m * shape_.n), kUntouched);
    GemmArgs args = product(c.data(), shape_.n);
    args.w = dense();
    const auto fn = reinterpret_cast<GemmFn>(kernel_named("gemm_q8_s8_s32_4x16_scalar").fn);
    fn(args, 0, shape_.m, 0, panels());
    return c;
  }

  SparseArgs sparse(float* c, int64_t c_stride, std::byte* scratch) const {
    return {product(c, c_stride), {values_->data(), columns_->data(), starts_->data()}, scratch};
  }
  int64_t panels() const { return round_up(shape_.n, kPanel) / kPanel; }
  const Shape& shape() const { return shape_; }
  const PackedSparse& packed() const { return sparse_; }
  std::string describe() const {
    return std::to_string(shape_.m) + "x" + std::to_string(shape_.n) + "x" + std::to_string(shape_.k) +
           " density " + std::to_string(shape_.density) + " activation " +
           std::to_string(static_cast<int>(activation_));
  }

 private:
  std::byte* dense() const {
    auto* const start = const_cast<std::byte*>(dense_.data());
    return start + (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
  }

  const Shape shape_;
  Rng rng_;
  int64_t a_stride_ = 0;
  std::unique_ptr<GuardedBuffer<uint8_t>> a_;
  std::vector<int8_t> w_;
  std::vector<std::byte> dense_;
  PackedSparse sparse_;
  std::unique_ptr<GuardedBuffer<int8_t>> values_;
  std::unique_ptr<GuardedBuffer<uint16_t>> columns_;
  std::unique_ptr<GuardedBuffer<int32_t>> starts_;
  std::vector<float> a_scale_, w_scale_, bias_, residual_;
  std::vector<int32_t> a_zero_, colsum_;
  bool with_bias_ = false, with_residual_ = false, exact_ = false, coarse_ = false;
  Activation activation_ = Activation::none;
};

struct Range2 {
  int64_t m_begin, m_end, panel_begin, panel_end;
};

// The outputs of those parts, one after the other; columns of the stride beyond n stay as they were.
std::vector<float> run(SparseFn fn, const Problem& problem, const std::vector<Range2>& parts) {
  const auto [m, n, k, density, all] = problem.shape();
  const int64_t stride = n + 3;
  GuardedBuffer<std::byte> scratch(static_cast<size_t>(round_up(sparse_scratch_bytes(k), 64)));
  GuardedBuffer<float> c(static_cast<size_t>((m - 1) * stride + n));
  std::fill(c.begin(), c.end(), kUntouched);
  for (const Range2& part : parts) {
    // What the last part left there must not matter.
    std::memset(scratch.data(), 0xa5, scratch.size());
    fn(problem.sparse(c.data(), stride, scratch.data()), part.m_begin, part.m_end, part.panel_begin,
       part.panel_end);
  }
  std::vector<float> rows;
  for (int64_t i = 0; i < m; ++i) {
    const float* const row = c.data() + i * stride;
    rows.insert(rows.end(), row, row + n);
    for (int64_t j = n; i + 1 < m && j < stride; ++j) CHECK_EQ(row[j], kUntouched, problem.describe());
  }
  return rows;
}

void check_same(const std::vector<float>& found, const std::vector<float>& wanted, const Problem& problem) {
  const int64_t n = problem.shape().n;
  for (size_t at = 0; at < found.size(); ++at) {
    CHECK(std::memcmp(&found[at], &wanted[at], sizeof(float)) == 0, "row=", at / static_cast<size_t>(n),
          " column=", at % static_cast<size_t>(n), " ", found[at], " ", wanted[at], " ", problem.describe());
  }
}

std::vector<Shape> sweep() {
  std::vector<Shape> shapes;
  Rng rng(5);
  constexpr double densities[] = {0, 0.02, 0.1, 0.2, 0.3, 0.5, 1};
  const auto density = [&] { return densities[rng.integer(0, 6)]; };
  for (const int64_t m : {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 100, 129}) {
    for (const int64_t n : {1, 3, 4, 5, 63, 64, 65, 130})
      shapes.push_back({m, n, rng.integer(1, 90), density()});
  }
  for (int64_t k = 1; k <= 70; ++k) shapes.push_back({rng.integer(1, 70), rng.integer(1, 130), k, density()});
  for (const double one : densities) shapes.push_back({37, 72, 300, one});
  for (int i = 0; i < 200; ++i) {
    shapes.push_back({rng.integer(1, 140), rng.integer(1, 200), rng.integer(1, 400), density()});
  }
  // 2,000 in all.
  while (shapes.size() < 1991) {
    shapes.push_back({rng.integer(1, 70), rng.integer(1, 140), rng.integer(1, 200), density()});
  }
  shapes.push_back({20, 8, 65536, 0.01});
  // Sums at the ends of int32.
  for (const int64_t m : {8, 16, 17, 64}) {
    shapes.push_back({m, 5, 65536, 1, -128});
    shapes.push_back({m, 5, 65536, 1, 127});
  }
  return shapes;
}

void check_kernel(const KernelInfo& kernel) {
  require_runnable(kernel);
  CHECK_EQ(std::string_view(kernel.op), std::string_view("sparse_q8s8"));
  const auto fn = reinterpret_cast<SparseFn>(kernel.fn);
  uint64_t seed = 0;
  for (const Shape& shape : sweep()) {
    const Problem problem(shape, seed++);
    CHECK_EQ(sparse_problem(problem.packed().weight(), problem.packed().groups(), shape.n, shape.k),
             std::string(), problem.describe());
    check_same(run(fn, problem, {{0, shape.m, 0, problem.panels()}}), problem.expected(), problem);
  }
}

// Rows and panels in pieces, in any order, give the bits of the whole; an empty piece does nothing.
void check_partitions(const KernelInfo& kernel) {
  require_runnable(kernel);
  const auto fn = reinterpret_cast<SparseFn>(kernel.fn);
  Rng rng(6);
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const Problem problem({rng.integer(60, 150), rng.integer(100, 300), rng.integer(20, 200), 0.3}, seed);
    std::vector<Range2> pieces = {{3, 3, 0, problem.panels()}, {0, problem.shape().m, 1, 1}};
    for (int64_t row = 0; row < problem.shape().m;) {
      const int64_t row_end = std::min(problem.shape().m, row + rng.integer(1, 70));
      for (int64_t panel = 0; panel < problem.panels();) {
        const int64_t panel_end = std::min(problem.panels(), panel + rng.integer(1, 2));
        pieces.push_back({row, row_end, panel, panel_end});
        panel = panel_end;
      }
      row = row_end;
    }
    for (size_t i = pieces.size(); i > 1; --i) {
      std::swap(pieces[i - 1], pieces[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    check_same(run(fn, problem, pieces), problem.expected(), problem);
  }
}

// Position of a row of a tile among its columns' values, see ColumnsOut.
int64_t position_of(int64_t row) { return 16 * (row % 16 / 4) + 4 * (row / 16) + row % 4; }

int32_t pattern(float value) { return std::bit_cast<int32_t>(value); }

// The same bits, or both no number.
bool same_number(float a, float b) { return pattern(a) == pattern(b) || (std::isnan(a) && std::isnan(b)); }

// Columns of a tile, from rows or from columns that the caller turned, are the values of rows in their
// places.
void check_columns(const KernelInfo& kernel) {
  require_runnable(kernel);
  const auto fn = reinterpret_cast<SparseFn>(kernel.fn);
  Rng rng(8);
  for (uint64_t seed = 0; seed < 300; ++seed) {
    constexpr double densities[] = {0, 0.02, 0.2, 0.5, 1};
    const Shape shape = {rng.integer(1, kTileRows), kBlockOutputs * rng.integer(1, 40), rng.integer(1, 300),
                         densities[rng.integer(0, 4)]};
    Problem problem(shape, seed);
    problem.keep_to_columns(seed % 3 == 0);
    const std::vector<float> wanted = problem.expected();
    GuardedBuffer<std::byte> scratch(static_cast<size_t>(round_up(sparse_scratch_bytes(shape.k), 64)));
    GuardedBuffer<uint8_t> features(static_cast<size_t>(features_bytes(shape.m, shape.k)));
    GuardedBuffer<float> values(static_cast<size_t>(shape.n * kTileRows)), above(kTileRows), below(kTileRows);
    SparseArgs args = problem.sparse(nullptr, 0, scratch.data());
    args.columns = {values.data(), above.data(), below.data()};
    if (rng.coin()) {
      args.features = features.data();
      fn(args, 0, shape.m, 0, problem.panels());
      std::fill(values.begin(), values.end(), kUntouched);
      args.turned = true;
    }
    fn(args, 0, shape.m, 0, problem.panels());
    for (int64_t row = 0; row < shape.m; ++row) {
      const auto at = static_cast<size_t>(position_of(row));
      int32_t largest = 0, smallest = 0;  // as patterns, without the sign
      for (int64_t j = 0; j < shape.n; ++j) {
        const float found = values.begin()[static_cast<size_t>(j) * kTileRows + at];
        const float one = wanted[static_cast<size_t>(row * shape.n + j)];
        CHECK(same_number(found, one), "row=", row, " column=", j, " ", found, " ", one, problem.describe());
        largest = std::max(largest, pattern(found));
        smallest = std::max(smallest, pattern(found) ^ INT32_MIN);
      }
      CHECK_EQ(pattern(above.begin()[at]), largest, problem.describe());
      CHECK_EQ(pattern(below.begin()[at]), smallest ^ INT32_MIN, problem.describe());
    }
  }
}

// The codes, scales and zero points that narrow_rows gives the same rows.
void check_narrow_columns(const KernelInfo& kernel) {
  require_runnable(kernel);
  const auto fn = reinterpret_cast<NarrowColumnsFn>(kernel.fn);
  const auto by_rows = reinterpret_cast<NarrowFn>(kernel_named("quantize_f32_scalar").fn);
  Rng rng(9);
  constexpr float kOdd[] = {0.0f, -0.0f, 1e-38f, -1e-38f, 1e38f, -1e38f, INFINITY, -INFINITY, NAN, -NAN};
  for (int round = 0; round < 400; ++round) {
    const int64_t rows = rng.integer(1, kTileRows), cols = rng.integer(1, 200);
    const auto size = static_cast<size_t>(rows * cols);
    std::vector<float> x(size);
    for (int64_t row = 0; row < rows; ++row) {
      // Rows of zeros, of one sign, of tiny numbers, and with what is no number.
      const int64_t form = rng.integer(0, 7);
      for (int64_t j = 0; j < cols; ++j) {
        float& one = x[static_cast<size_t>(row * cols + j)];
        one = form == 0 ? 0.0f : form == 1 ? 1e-37f * rng.normal() : 3 * rng.normal();
        if (form == 2) one = std::fabs(one);
        if (form == 3) one = -std::fabs(one);
        if (form == 4 && rng.integer(0, 20) == 0) one = kOdd[rng.integer(0, 9)];
      }
    }
    const bool symmetric = rng.coin();
    const int64_t stride = round_up(cols, 64);
    std::vector<uint8_t> wanted(static_cast<size_t>(rows * stride));
    std::vector<float> wanted_scale(static_cast<size_t>(rows));
    std::vector<int32_t> wanted_zero(static_cast<size_t>(rows));
    NarrowArgs plain{.cols = cols, .x = x.data(), .x_stride = cols};
    plain.out.kind = symmetric ? NarrowOut::Kind::q8_symmetric : NarrowOut::Kind::q8_zero_point;
    plain.out.data = wanted.data();
    plain.out.stride = stride;
    plain.out.scale = wanted_scale.data();
    plain.out.zero = wanted_zero.data();
    by_rows(plain, 0, rows);

    GuardedBuffer<float> values(static_cast<size_t>(cols * kTileRows)), above(kTileRows), below(kTileRows);
    std::fill(values.begin(), values.end(), kUntouched);
    for (int64_t row = 0; row < kTileRows; ++row) {
      const auto at = static_cast<size_t>(position_of(row));
      int32_t largest = 0, smallest = 0;  // as patterns, without the sign
      for (int64_t j = 0; row < rows && j < cols; ++j) {
        const float one = x[static_cast<size_t>(row * cols + j)];
        values.begin()[static_cast<size_t>(j) * kTileRows + at] = one;
        largest = std::max(largest, pattern(one));
        smallest = std::max(smallest, pattern(one) ^ INT32_MIN);
      }
      above.begin()[at] = std::bit_cast<float>(largest);
      below.begin()[at] = std::bit_cast<float>(smallest ^ INT32_MIN);
    }
    GuardedBuffer<uint8_t> codes(static_cast<size_t>(cols * kTileRows));
    NarrowColumnsArgs args{.rows = rows, .cols = cols};
    args.from = {values.data(), above.data(), below.data()};
    args.symmetric = symmetric;
    args.codes = codes.data();
    GuardedBuffer<float> scale(static_cast<size_t>(rows));
    GuardedBuffer<int32_t> zero(static_cast<size_t>(rows));
    args.scale = scale.data();
    args.zero = zero.data();
    fn(args);
    for (int64_t row = 0; row < rows; ++row) {
      const auto at = static_cast<size_t>(row);
      CHECK(same_number(args.scale[row], wanted_scale[at]), args.scale[row], " ", wanted_scale[at]);
      CHECK_EQ(args.zero[row], wanted_zero[at], wanted_scale[at]);
      for (int64_t j = 0; j < cols && !std::isnan(wanted_scale[at]); ++j) {
        CHECK_EQ(int{codes.begin()[j * kTileRows + row]}, int{wanted[static_cast<size_t>(row * stride + j)]});
      }
    }
  }
}

// Rows that the caller keeps as columns are turned once, and multiplied by panels in any order.
void check_kept_features(const KernelInfo& kernel) {
  require_runnable(kernel);
  const auto fn = reinterpret_cast<SparseFn>(kernel.fn);
  Rng rng(7);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const Shape shape = {rng.integer(1, 200), rng.integer(65, 300), rng.integer(1, 200), 0.3};
    Problem problem(shape, seed);
    const std::vector<float> wanted = problem.expected();
    const int64_t begin = rng.integer(0, shape.m - 1), first = rng.integer(0, problem.panels() - 1);
    GuardedBuffer<std::byte> scratch(static_cast<size_t>(round_up(sparse_scratch_bytes(shape.k), 64)));
    GuardedBuffer<uint8_t> features(static_cast<size_t>(features_bytes(shape.m - begin, shape.k)));
    std::vector<float> c(static_cast<size_t>(shape.m * shape.n), kUntouched);
    SparseArgs args = problem.sparse(c.data(), shape.n, scratch.data());
    args.features = features.data();
    fn(args, begin, shape.m, first, first + 1);
    args.turned = true;
    problem.spoil_inputs();
    for (int64_t panel = 0; panel < problem.panels(); ++panel) {
      if (panel != first) fn(args, begin, shape.m, panel, panel + 1);
    }
    for (int64_t at = 0; at < shape.m * shape.n; ++at) {
      const float one = at < begin * shape.n ? kUntouched : wanted[static_cast<size_t>(at)];
      CHECK(same_number(c[static_cast<size_t>(at)], one), at, " ", c[static_cast<size_t>(at)], " ", one, " ",
            problem.describe());
    }
  }
}

void check_any(const char* name) {
  const KernelInfo& kernel = kernel_named(name);
  const std::string_view op = kernel.op;
  if (op == "narrow_columns") return check_narrow_columns(kernel);
  if (op == "sparse_q8s8_columns") return check_columns(kernel);
  check_kernel(kernel);
  check_partitions(kernel);
  check_kept_features(kernel);
}

#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, FunctionType) \
  ENCAST_TEST(name) { check_any(#name); }
#include "kernels/sparse/kernels.inc"
#undef ENCAST_KERNEL

// The runtime asks the one, kernels the other.
ENCAST_TEST(activations_that_have_a_coarse_form) {
  for (const auto kind : {Activation::none, Activation::gelu, Activation::gelu_tanh, Activation::relu,
                          Activation::silu, Activation::tanh}) {
    CHECK_EQ(bump_of(kind) != nullptr, has_coarse_form(kind), static_cast<int>(kind));
  }
}

// What a file may say wrongly.
ENCAST_TEST(damaged_weights_are_refused) {
  const int64_t n = 6, k = 9;
  std::vector<int8_t> w(static_cast<size_t>(n * k), 1);
  w[0] = w[9] = w[18] = w[27] = 0;  // block 0: columns 1 to 8; block 1: 0 to 8
  const PackedSparse good = pack_sparse(w.data(), n, k);
  CHECK_EQ(good.groups(), int64_t{2 + 3});
  CHECK_EQ(sparse_problem(good.weight(), 5, n, k), std::string());
  const auto refused = [&](std::string_view words, const std::function<void(PackedSparse&)>& damage) {
    PackedSparse bad = good;
    damage(bad);
    const std::string problem = sparse_problem(bad.weight(), 5, n, k);
    CHECK(problem.find(words) != std::string::npos, words, ": ", problem);
  };
  refused("begin at 0", [](PackedSparse& bad) { bad.starts[0] = 1; });
  refused("end with the groups", [](PackedSparse& bad) { bad.starts.back() = 4; });
  refused("ends before it begins", [](PackedSparse& bad) { bad.starts[1] = 6; });
  refused("ends before it begins", [](PackedSparse& bad) { bad.starts[1] = -1; });
  refused("block 0, column 2: is 9, there are 9", [](PackedSparse& bad) { bad.columns[2] = 9; });
  refused("block 0, column 0: is 65535", [](PackedSparse& bad) { bad.columns[0] = 65535; });
  refused("block 0, column 3: columns do not rise", [](PackedSparse& bad) { bad.columns[3] = 1; });
  refused("block 0, column 3: columns do not rise",
          [](PackedSparse& bad) { bad.columns[3] = bad.columns[2]; });
  // In the last group, but the first of it: nothing is filled there.
  refused("block 0, column 4: columns do not rise",
          [](PackedSparse& bad) { bad.columns[4] = bad.columns[3]; });
  refused("block 0, column 5: repeats", [](PackedSparse& bad) { bad.columns[5] = bad.columns[4]; });
  refused("block 1, column 9: repeats", [](PackedSparse& bad) { bad.values[4 * 16 + 1] = 1; });
  // A weight of zeros alone.
  std::fill(w.begin(), w.end(), int8_t{0});
  PackedSparse zeros = pack_sparse(w.data(), n, k);
  CHECK_EQ(zeros.values.size(), size_t{16});
  CHECK_EQ(sparse_problem(zeros.weight(), 1, n, k), std::string());
  CHECK(!sparse_problem(zeros.weight(), 2, n, k).empty());
  CHECK(!sparse_problem(good.weight(), 5, n, kMostSparseInputs + 1).empty());
}

}  // namespace
}  // namespace encast::testing

ENCAST_TEST_MAIN
