#include "kernels/catalog.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "testing/check.h"

namespace encast::testing {
namespace {

ENCAST_TEST(rows_are_well_formed) {
  const std::set<std::string_view> families = {"gemm",  "sparse", "attention", "norm",  "elementwise",
                                               "gated", "rotary", "quantize",  "embed", "reduce"};
  std::set<std::string_view> names, seen;
  for (const KernelInfo& kernel : all_kernels()) {
    CHECK(families.contains(kernel.family), kernel.name);
    seen.insert(kernel.family);
    CHECK(names.insert(kernel.name).second, kernel.name, " twice");
    const std::string name = kernel.name, level = isa_name(kernel.isa);
    CHECK(name.ends_with("_" + level), name, " is of level ", level);
    CHECK_LE(1, kernel.min_rows, name);
    CHECK(kernel.fn != nullptr, name);
  }
  CHECK_EQ(seen.size(), families.size());
}

// What catalog.h promises, from a second reading of it.
ENCAST_TEST(selection_takes_the_highest_level_then_the_most_rows) {
  for (const KernelInfo& wanted : all_kernels()) {
    for (const int64_t rows : {0, 1, 2, 7, 8, 100, 100000}) {
      const KernelInfo* selected = select_kernel(wanted.op, wanted.arithmetic, rows);
      bool any = false;
      for (const KernelInfo& other : all_kernels()) {
        const bool fits = std::string_view(other.op) == wanted.op &&
                          std::string_view(other.arithmetic) == wanted.arithmetic && isa_allowed(other.isa) &&
                          other.min_rows <= std::max<int64_t>(rows, 1);
        if (!fits) continue;
        any = true;
        CHECK(selected != nullptr, wanted.op, " ", wanted.arithmetic, " rows=", rows);
        CHECK(std::pair(selected->isa, selected->min_rows) >= std::pair(other.isa, other.min_rows), rows,
              " rows: ", selected->name, " instead of ", other.name);
      }
      if (!any) {
        CHECK(selected == nullptr, wanted.op, " ", wanted.arithmetic);
        continue;
      }
      CHECK(std::string_view(selected->op) == wanted.op &&
                std::string_view(selected->arithmetic) == wanted.arithmetic && isa_allowed(selected->isa) &&
                selected->min_rows <= std::max<int64_t>(rows, 1),
            selected->name);
    }
  }
}

// Every class that a plan may name on any machine must be runnable without special instructions.
ENCAST_TEST(portable_classes_have_a_scalar_member) {
  for (const auto& [op, arithmetic] :
       {std::pair{"gemm_f32", "f32"}, {"gemm_q8s8", "s8"}, {"gemm_bf16", "bf16_fma"}}) {
    const KernelInfo* selected = select_kernel(op, arithmetic, 1);
    CHECK(selected != nullptr, op, " ", arithmetic);
  }
}

ENCAST_TEST(unknown_ops_and_classes_have_none) {
  CHECK(select_kernel("gemm_f64", "f32", 1) == nullptr);
  CHECK(select_kernel("gemm_f32", "bf16_dp", 1) == nullptr);
  CHECK(select_kernel("", "", 1) == nullptr);
}

}  // namespace
}  // namespace encast::testing

ENCAST_TEST_MAIN
