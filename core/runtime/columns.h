#pragma once
#include <algorithm>

#include "kernels/catalog.h"
#include "kernels/sparse/sparse.h"
#include "runtime/plan.h"

// Products of which sparse products alone read the narrowed outputs: in a feed-forward, those before the
// activation. A thread that takes a tile of rows through a stage alone keeps such outputs and their narrow
// copy as columns (kernels/sparse/sparse.h) in the memory that the block has for them as rows: nothing turns
// them to rows and back.
namespace encast {

inline bool step_reads(const StepDecl& step, int id) { return step.x == id || step.other == id; }

// The only step that reads value `id`, which nobody outside of a block does; or null.
inline const StepDecl* only_reader(const Plan& plan, int id) {
  const auto is_output = [&](const OutputDecl& output) { return output.value == id; };
  if (!plan.values[static_cast<size_t>(id)].in_block || std::ranges::any_of(plan.outputs, is_output))
    return nullptr;
  const StepDecl* found = nullptr;
  for (const StepDecl& step : plan.steps) {
    if (!step_reads(step, id)) continue;
    if (found != nullptr) return nullptr;
    found = &step;
  }
  return found;
}

// The step that makes value `id`.
inline const StepDecl* maker(const Plan& plan, int id) {
  const auto makes = [&](const StepDecl& step) { return step.out == id || step.also == id; };
  const auto found = std::ranges::find_if(plan.steps, makes);
  return found == plan.steps.end() ? nullptr : &*found;
}

// The step that narrows what `product` makes, where both may be columns; or null.
inline const StepDecl* narrows_columns(const Plan& plan, const StepDecl& product) {
  if (product.kind != StepKind::sparse || product.other >= 0 || plan.block_rows % kTileRows != 0 ||
      plan.values[static_cast<size_t>(product.out)].cols % kBlockOutputs != 0) {
    return nullptr;
  }
  const bool coarse = product.coarse && !plan.exact &&
                      (product.act == Activation::gelu || product.act == Activation::gelu_tanh);
  if (product.act != Activation::none && !coarse) return nullptr;
  if (select_kernel("sparse_q8s8_columns", product.arithmetic, kTileRows) == nullptr ||
      select_kernel("narrow_columns", "f32", kTileRows) == nullptr) {
    return nullptr;
  }
  const StepDecl* const narrow = only_reader(plan, product.out);
  if (narrow == nullptr || narrow->kind != StepKind::narrow || narrow->q8_scale > 0 ||
      plan.values[static_cast<size_t>(narrow->out)].dtype != DType::q8) {
    return nullptr;
  }
  const StepDecl* const reader = only_reader(plan, narrow->out);
  return reader != nullptr && reader->kind == StepKind::sparse && reader->x == narrow->out ? narrow : nullptr;
}

// Whether a narrow step turns columns to columns.
inline bool takes_columns(const Plan& plan, const StepDecl& narrow) {
  const StepDecl* const product = maker(plan, narrow.x);
  return product != nullptr && product->out == narrow.x && narrows_columns(plan, *product) != nullptr;
}

// Fewer rows are no fuller tile: they are rows.
constexpr bool rows_fill_columns(int64_t rows) { return rows > kTileRows / 2 && rows <= kTileRows; }

}  // namespace encast
