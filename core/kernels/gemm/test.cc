#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>

#include "cpu/isa.h"
#include "kernels/catalog.h"
#include "kernels/gemm/amx.h"
#include "kernels/gemm/problem.h"
#include "testing/amx_stand_in.h"
#include "testing/check.h"

// Every row of the manifest against the reference, its class and its own partitions, on operands that end at
// guard pages. A kernel that this machine cannot run is skipped by name.
namespace encast::testing {
namespace {

const KernelInfo& kernel_named(std::string_view name) {
  for (const KernelInfo& kernel : all_kernels()) {
    if (name == kernel.name) return kernel;
  }
  fail(__FILE__, __LINE__, "no kernel " + std::string(name));
}

GemmFn function_of(const KernelInfo& kernel) { return reinterpret_cast<GemmFn>(kernel.fn); }

GemmOperands operands_of(const KernelInfo& kernel) {
  const std::string_view op = kernel.op;
  CHECK(op == "gemm_f32" || op == "gemm_q8s8" || op == "gemm_bf16", op);
  return op == "gemm_f32" ? GemmOperands::f32 : op == "gemm_bf16" ? GemmOperands::bf16 : GemmOperands::q8s8;
}

// The first kernel of the manifest with the same op and arithmetic: the one that the others must equal.
const KernelInfo& first_of_class(const KernelInfo& kernel) {
  for (const KernelInfo& other : all_kernels()) {
    if (std::string_view(other.op) == kernel.op && std::string_view(other.arithmetic) == kernel.arithmetic) {
      return other;
    }
  }
  return kernel;
}

void require_runnable(const KernelInfo& kernel) {
  if (isa_allowed(kernel.isa)) return;
  const IsaInfo& level = isa_levels()[static_cast<size_t>(kernel.isa)];
  SKIP_TEST("level ", level.name,
            level.missing.empty() ? " is forbidden by ENCAST_ISA" : " lacks " + level.missing);
}

constexpr int64_t kColumns[] = {1, 3, 15, 16, 17, 31, 33, 47, 49, 63, 64, 65, 97, 127, 128, 129, 130};
constexpr Activation kActivations[] = {Activation::gelu, Activation::gelu_tanh, Activation::relu,
                                       Activation::silu, Activation::tanh};

// Shapes that reach the tails of every axis, and blocks of k and of rows; the rest by chance.
std::vector<Spec> sweep() {
  std::vector<Spec> specs;
  Rng rng(1);
  const auto add = [&](int64_t m, int64_t n, int64_t k) {
    Spec spec{.m = m, .n = n, .k = k, .seed = specs.size()};
    spec.bias = rng.coin();
    spec.residual = rng.coin();
    spec.symmetric = rng.coin();
    if (rng.coin()) {
      spec.activation = kActivations[rng.integer(0, std::size(kActivations) - 1)];
      spec.exact = rng.coin();
      spec.coarse = rng.coin();
    }
    specs.push_back(spec);
  };
  for (int64_t m = 1; m <= 13; ++m) {
    for (int64_t n : kColumns) add(m, n, rng.integer(1, 70));
  }
  for (int64_t k = 0; k <= 70; ++k) {
    add(rng.integer(1, 13), rng.integer(1, 130), k);
    add(rng.integer(1, 13), 64, k);
  }
  for (int64_t k : {255, 1023, 1024, 1025, 1030, 2047, 2050, 4096, 4097, 4100}) {
    add(rng.integer(1, 13), rng.integer(1, 130), k);
    add(rng.integer(6, 13), 128, k);
  }
  for (int64_t m : {31, 32, 33, 47, 64, 65, 131}) add(m, rng.integer(60, 70), 1030);
  return specs;
}

void check_against_reference(const Problem& problem, const Outputs& outputs, bool fma_in_order = false) {
  const GemmReference reference = problem.reference(fma_in_order);
  for (int64_t i = 0; i < problem.spec().m; ++i) {
    for (int64_t j = 0; j < problem.spec().n; ++j) {
      const auto at = static_cast<size_t>(i * problem.spec().n + j);
      CHECK_LE(std::fabs(double{outputs.at(i, j)} - reference.c[at]), reference.bound[at], "row=", i,
               " column=", j, " ", problem.describe());
    }
  }
}

void check_kernel(const KernelInfo& kernel) {
  require_runnable(kernel);
  const GemmFn first = function_of(first_of_class(kernel));
  for (const Spec& spec : sweep()) {
    const Problem problem(operands_of(kernel), spec);
    Outputs outputs(problem);
    outputs.run(function_of(kernel));
    check_against_reference(problem, outputs, std::string_view(kernel.arithmetic) == "bf16_fma");
    if (first == function_of(kernel) || !isa_allowed(first_of_class(kernel).isa)) continue;
    Outputs expected(problem);
    expected.run(first);
    outputs.check_same(expected);
  }
}

// Rows and panels in pieces, in any order, must give the bits of the whole, and each piece must leave the
// others' outputs alone.
void check_partitions(GemmFn fn, GemmOperands operands) {
  Rng rng(2);
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{13, 200, 70},
                                {40, 130, 33},
                                {70, 129, 1030},
                                {150, 64, 4100},
                                {7, 320, 2050},
                                // blocks of several panels with AMX, the last one shorter: int8, bf16
                                {40, 650, 1000},
                                {40, 650, 500}}) {
    for (const Activation activation : {Activation::none, Activation::gelu}) {
      const Problem problem(operands, {.m = m, .n = n, .k = k, .residual = true, .activation = activation});
      Outputs whole(problem), pieces(problem);
      whole.run(fn);
      const int64_t panels = (n + kPanel - 1) / kPanel;
      struct Piece {
        int64_t m_begin, m_end, panel_begin, panel_end;
      };
      std::vector<Piece> order;
      for (int64_t row = 0; row < m;) {
        const int64_t row_end = std::min(m, row + rng.integer(1, 17));
        for (int64_t panel = 0; panel < panels;) {
          const int64_t panel_end = std::min(panels, panel + rng.integer(1, 2));
          order.push_back({row, row_end, panel, panel_end});
          panel = panel_end;
        }
        row = row_end;
      }
      for (size_t i = order.size(); i > 1; --i) {
        std::swap(order[i - 1], order[static_cast<size_t>(rng.integer(0, static_cast<int64_t>(i) - 1))]);
      }
      pieces.run(fn, 3, 3, 0, panels);  // nothing to do
      pieces.run(fn, 0, m, 1, 1);
      pieces.check_untouched_outside(0, 0, 0, 0);
      bool alone = true;
      for (const auto& [m_begin, m_end, panel_begin, panel_end] : order) {
        pieces.run(fn, m_begin, m_end, panel_begin, panel_end);
        if (alone) {
          pieces.check_untouched_outside(m_begin, m_end, panel_begin * kPanel,
                                         std::min(n, panel_end * kPanel));
        }
        alone = false;
      }
      pieces.check_same(whole);
    }
  }
}

// What a row holds must not reach its neighbours.
void check_rows_are_apart(GemmFn fn, GemmOperands operands) {
  for (int64_t poisoned = 0; poisoned < 9; ++poisoned) {
    Problem problem(operands, {.m = 9, .n = 70, .k = 37, .bias = true, .activation = Activation::gelu});
    Outputs before(problem), after(problem);
    before.run(fn);
    problem.poison_row(poisoned);
    after.run(fn);
    for (int64_t row = 0; row < 9; ++row) {
      if (row != poisoned) after.check_same_row(before, row);
    }
    CHECK(operands == GemmOperands::q8s8 || std::isnan(after.at(poisoned, 0)), "row=", poisoned);
  }
}

// As the contract of sixteen lanes has it (simd/vec.h).
uint16_t rounded_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>((u | 0x400000) >> 16);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Outputs in bf16 are those in f32, rounded; the columns that fill the last panel are zeros, whatever the
// rows hold.
void check_bf16_outputs(GemmFn fn, GemmOperands operands) {
  Rng rng(3);
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 64, 33},
                                {3, 1, 5},
                                {7, 65, 0},
                                {13, 130, 70},
                                {40, 127, 1030},
                                {6, 128, 4100},
                                {33, 192, 4100},
                                {40, 650, 1000},
                                {40, 650, 500}}) {
    for (const Activation activation : {Activation::none, Activation::gelu, Activation::tanh}) {
      for (const bool poisoned : {false, true}) {
        Problem problem(operands, {.m = m,
                                   .n = n,
                                   .k = k,
                                   .bias = rng.coin(),
                                   .residual = rng.coin(),
                                   .activation = activation,
                                   .coarse = rng.coin(),
                                   .seed = static_cast<uint64_t>(k)});
        if (poisoned && k > 0) problem.poison_row(m / 2);
        Outputs expected(problem);
        expected.run(fn);
        const int64_t panels = (n + kPanel - 1) / kPanel, columns = panels * kPanel, stride = columns + 64;
        GuardedBuffer<uint16_t> c(static_cast<size_t>((m - 1) * stride + columns));
        constexpr uint16_t kUntouched = 0x4bad;
        std::fill(c.begin(), c.end(), kUntouched);
        GemmArgs args = problem.args(nullptr, stride);
        args.c_bf16 = c.data();
        const int64_t some = rng.integer(0, m), part = rng.integer(0, panels);
        fn(args, 0, m, part, panels);
        fn(args, some, m, 0, part);
        fn(args, 0, some, 0, part);
        for (size_t i = 0; i < c.size(); ++i) {
          const int64_t row = static_cast<int64_t>(i) / stride, column = static_cast<int64_t>(i) % stride;
          const uint16_t want = column < n         ? rounded_to_bf16(expected.at(row, column))
                                : column < columns ? uint16_t{0}
                                                   : kUntouched;
          CHECK_EQ(c[i], want, "row=", row, " column=", column, " ", problem.describe());
        }
      }
    }
  }
}

#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, FunctionType)                      \
  ENCAST_TEST(name) { check_kernel(kernel_named(#name)); }                                    \
  ENCAST_TEST(partitions_##name) {                                                            \
    require_runnable(kernel_named(#name));                                                    \
    check_partitions(function_of(kernel_named(#name)), operands_of(kernel_named(#name)));     \
  }                                                                                           \
  ENCAST_TEST(bf16_outputs_##name) {                                                          \
    require_runnable(kernel_named(#name));                                                    \
    check_bf16_outputs(function_of(kernel_named(#name)), operands_of(kernel_named(#name)));   \
  }                                                                                           \
  ENCAST_TEST(rows_apart_##name) {                                                            \
    require_runnable(kernel_named(#name));                                                    \
    check_rows_are_apart(function_of(kernel_named(#name)), operands_of(kernel_named(#name))); \
  }
#include "kernels/gemm/kernels.inc"
#undef ENCAST_KERNEL

// The largest sums that bytes can make: where 16-bit intermediates would saturate.
ENCAST_TEST(extreme_bytes_do_not_saturate) {
  for (const KernelInfo& kernel : all_kernels()) {
    if (std::string_view(kernel.op) != "gemm_q8s8" || !isa_allowed(kernel.isa)) continue;
    for (const int a : {0, 1, 127, 128, 129, 255}) {
      for (const int w : {-128, -127, -1, 127}) {
        Problem problem(GemmOperands::q8s8, {.m = 7, .n = 65, .k = 4100, .symmetric = false});
        problem.fill_bytes(static_cast<uint8_t>(a), static_cast<int8_t>(w));
        Outputs outputs(problem);
        outputs.run(function_of(kernel));
        check_against_reference(problem, outputs);
      }
    }
  }
}

// An absent bias is not a bias of +0: adding that would turn -0 into +0.
ENCAST_TEST(absent_bias_keeps_signed_zero) {
  for (const KernelInfo& kernel : all_kernels()) {
    if (std::string_view(kernel.op) != "gemm_f32" || !isa_allowed(kernel.isa)) continue;
    Problem problem(GemmOperands::f32, {.m = 7, .n = 70, .k = 1});
    problem.fill_floats(-0x1p-100f, 0x1p-100f);  // the product rounds to -0
    Outputs outputs(problem);
    outputs.run(function_of(kernel));
    for (int64_t row = 0; row < 7; ++row) {
      for (int64_t column = 0; column < 70; ++column) {
        CHECK(outputs.at(row, column) == 0.0f && std::signbit(outputs.at(row, column)), kernel.name);
      }
    }
  }
}

void amx_q8_stand_in(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                     int64_t panel_end) {
  compute_amx<AmxQ8, AmxStandIn>(args, m_begin, m_end, panel_begin, panel_end);
}
void amx_bf16_stand_in(const GemmArgs& args, int64_t m_begin, int64_t m_end, int64_t panel_begin,
                       int64_t panel_end) {
  compute_amx<AmxBF16, AmxStandIn>(args, m_begin, m_end, panel_begin, panel_end);
}

void check_stand_in(GemmFn fn, GemmOperands operands, std::optional<GemmFn> same_class) {
  for (const Spec& spec : sweep()) {
    const Problem problem(operands, spec);
    Outputs outputs(problem);
    outputs.run(fn);
    check_against_reference(problem, outputs);
    if (!same_class.has_value()) continue;
    Outputs expected(problem);
    expected.run(*same_class);
    outputs.check_same(expected);
  }
  check_partitions(fn, operands);
  check_rows_are_apart(fn, operands);
  check_bf16_outputs(fn, operands);
}

ENCAST_TEST(amx_q8_on_a_stand_in) {
  check_stand_in(amx_q8_stand_in, GemmOperands::q8s8,
                 function_of(kernel_named("gemm_q8_s8_s32_4x16_scalar")));
}
ENCAST_TEST(amx_bf16_on_a_stand_in) { check_stand_in(amx_bf16_stand_in, GemmOperands::bf16, std::nullopt); }

}  // namespace
}  // namespace encast::testing

ENCAST_TEST_MAIN
