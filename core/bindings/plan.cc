#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "kernels/gemm/gemm.h"
#include "kernels/sparse/sparse.h"
#include "runtime/head_tasks.h"
#include "runtime/plan.h"
#include "runtime/step_keys.h"

namespace nb = nanobind;

namespace encast {
namespace {

using namespace nb::literals;

// A step as Python sees it.
struct PlanStep {
  int64_t index;
  std::string kind, name;
  nb::dict keys;
};

// What a key of a step says: the value or weight that it names, or a number, flag or word; none where it
// names no operand.
struct KeyObject {
  const Plan& plan;
  const StepDecl& step;

  nb::object operator()(ValueKey key) const { return operand(plan.values, step.*key.id); }
  nb::object operator()(WeightKey key) const { return operand(plan.weights, step.*key.id); }
  nb::object operator()(IntegerKey key) const { return nb::int_(step.*key.member); }
  nb::object operator()(float StepDecl::*real) const { return nb::float_(step.*real); }
  nb::object operator()(bool StepDecl::*flag) const { return nb::bool_(step.*flag); }
  nb::object operator()(std::string StepDecl::*word) const { return text(step.*word); }
  nb::object operator()(Activation StepDecl::*act) const {
    return text(kActivationNames[static_cast<size_t>(step.*act)]);
  }
  nb::object operator()(Pooling StepDecl::*mode) const {
    return text(kPoolingNames[static_cast<size_t>(step.*mode)]);
  }

 private:
  template <class Decl>
  static nb::object operand(const std::vector<Decl>& all, int id) {
    return id < 0 ? nb::none() : nb::cast(all[static_cast<size_t>(id)]);
  }
  static nb::object text(std::string_view word) { return nb::str(word.data(), word.size()); }
};

nb::dict keys_of(const Plan& plan, const StepDecl& step) {
  nb::dict keys;
  for_each_key(step.kind, [&](const StepKey& key, bool) {
    const nb::object said = std::visit(KeyObject{plan, step}, key.member);
    if (!said.is_none()) keys[nb::str(key.name.data(), key.name.size())] = said;
  });
  return keys;
}

DType dtype_of(std::string_view name) {
#define ENCAST_DTYPE(dtype, bytes) \
  if (name == #dtype) return DType::dtype;
#include "base/dtype.inc"
#undef ENCAST_DTYPE
  throw InputError("no dtype is called '" + std::string(name) + "'");
}

WeightLayout layout_of(std::string_view name) {
  for (const auto layout : {WeightLayout::dense, WeightLayout::panels, WeightLayout::padded}) {
    if (name == layout_name(layout)) return layout;
  }
  throw InputError("no layout of weights is called '" + std::string(name) + "'");
}

const char* place_name(const ValueDecl& value) {
  if (value.offset == ValueDecl::kCallerMemory) return "caller";
  return value.in_block ? "block" : "arena";
}

// Those for which wanted(index) holds.
template <class Wanted>
std::vector<PlanStep> steps_of(const Plan& plan, Wanted wanted) {
  std::vector<PlanStep> steps;
  for (size_t index = 0; index < plan.steps.size(); ++index) {
    const StepDecl& step = plan.steps[index];
    if (wanted(index))
      steps.push_back({static_cast<int64_t>(index), step_name(step.kind), step.name, keys_of(plan, step)});
  }
  return steps;
}

nb::list stages_of(const Plan& plan) {
  nb::list stages;
  for (const StageDecl& stage : plan.stages) {
    stages.append(nb::make_tuple(stage_name(stage.kind), stage.begin, stage.end));
  }
  return stages;
}

nb::dict outputs_of(const Plan& plan) {
  nb::dict outputs;
  for (const OutputDecl& output : plan.outputs) {
    outputs[nb::str(output.name.c_str())] = nb::cast(plan.values[static_cast<size_t>(output.value)]);
  }
  return outputs;
}

std::vector<PlanStep> needed_of(const Plan& plan, const std::string& output) {
  for (const OutputDecl& decl : plan.outputs) {
    if (decl.name != output) continue;
    const std::vector<bool> needed = plan.needed_steps(decl.value);
    return steps_of(plan, [&](size_t index) { return needed[index]; });
  }
  throw InputError("the plan has no output '" + output + "'");
}

}  // namespace

void bind_plan(nb::module_& m) {
  m.attr("PANEL") = kPanel;
  m.attr("BLOCK_UNIT") = ValueDecl::kBlockUnit;
  m.attr("SPARSE_TILE_ROWS") = kTileRows;
  m.attr("BLOCK_OUTPUTS") = kBlockOutputs;
  m.attr("GROUP_INPUTS") = kGroupInputs;
  m.attr("MOST_SPARSE_INPUTS") = kMostSparseInputs;
  m.def(
      "element_bytes", [](std::string_view dtype) { return element_bytes(dtype_of(dtype)); }, "dtype"_a);
  m.def(
      "panel_group", [](std::string_view dtype) { return panel_group(dtype_of(dtype)); }, "dtype"_a,
      "Inputs of an output that stand side by side in a panel of weights of the dtype.");
  m.def(
      "weight_bytes",
      [](std::string_view dtype, std::string_view layout, int64_t rows, int64_t cols) {
        return WeightDecl{dtype_of(dtype), layout_of(layout), rows, cols, 0}.bytes();
      },
      "dtype"_a, "layout"_a, "rows"_a, "cols"_a, "Of a weight of a plan as it is stored.");
  m.def(
      "value_bytes",
      [](std::string_view dtype, int64_t rows, int64_t cols) {
        return ValueDecl{.dtype = dtype_of(dtype), .cols = cols}.bytes(rows);
      },
      "dtype"_a, "rows"_a, "cols"_a, "Of a value of a plan as it lies in memory.");
  m.def("heads_fill_panels", &heads_fill_panels, "heads"_a, "head_dim"_a,
        "Whether a stage of heads can cut a product for so many heads into whole panels.");

  m.def(
      "step_kinds",
      [] {
        nb::list kinds;
#define ENCAST_STEP(kind) kinds.append(#kind);
#include "runtime/steps/steps.inc"
#undef ENCAST_STEP
        return kinds;
      },
      "The kinds of steps of plans.");

  nb::class_<WeightDecl>(m, "PlanWeight")
      .def_prop_ro("dtype", [](const WeightDecl& self) { return dtype_name(self.dtype); })
      .def_prop_ro("layout", [](const WeightDecl& self) { return layout_name(self.layout); })
      .def_ro("rows", &WeightDecl::rows)
      .def_ro("cols", &WeightDecl::cols)
      .def_ro("offset", &WeightDecl::offset, "In the file of weights.")
      .def_prop_ro("nbytes", &WeightDecl::bytes, "As stored: panels and padded vectors with their padding.");

  nb::class_<ValueDecl>(m, "PlanValue")
      .def_prop_ro("dtype", [](const ValueDecl& self) { return dtype_name(self.dtype); })
      .def_prop_ro(
          "rows", [](const ValueDecl& self) { return rows_name(self.rows); }, "tokens, seqs or selected.")
      .def_ro("cols", &ValueDecl::cols)
      .def_prop_ro("place", &place_name, "block (a thread's own memory), arena or caller.")
      .def(
          "row_bytes",
          [](const ValueDecl& self, std::optional<int64_t> columns) {
            return self.row_bytes(columns.value_or(self.cols));
          },
          "columns"_a = nb::none(),
          "Of all columns of a row, or so many, without padding; a q8 row with its scale and zero point.");

  nb::class_<PlanStep>(m, "PlanStep")
      .def_ro("index", &PlanStep::index)
      .def_ro("kind", &PlanStep::kind)
      .def_ro("name", &PlanStep::name)
      .def_ro(
          "keys", &PlanStep::keys,
          "What it says, by key: operands as PlanValue and PlanWeight; a key without an operand is absent.");

  nb::class_<Plan>(m, "Plan", "A plan as the core reads it; core/runtime/plan.h has the grammar.")
      .def(
          "__init__", [](Plan* self, const std::string& text) { new (self) Plan(Plan::parse(text)); },
          "text"_a, "Parses and validates a plan's text; raises PlanError.")
      .def_ro("chunk_tokens", &Plan::chunk_tokens)
      .def_ro("arena", &Plan::arena)
      .def_ro("block", &Plan::block, "Bytes of a block's memory for every BLOCK_UNIT rows.")
      .def_ro("block_rows", &Plan::block_rows)
      .def_prop_ro("steps", [](const Plan& self) { return steps_of(self, [](size_t) { return true; }); })
      .def_prop_ro("stages", &stages_of, "(kind, first step, step after the last) of every stage.")
      .def_prop_ro("outputs", &outputs_of, "Name to value.")
      .def("needed", &needed_of, "output"_a, "The steps that run for an output, in order.");
}

}  // namespace encast
