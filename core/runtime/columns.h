#pragma once
#include <algorithm>

#include "base/activation.h"
#include "kernels/catalog.h"
#include "kernels/sparse/sparse.h"
#include "runtime/binding.h"

// Products of which a sparse product alone reads the narrowed outputs: in a feed-forward, those before the
// activation. A thread that takes a tile of rows through a stage alone keeps such outputs and their narrow
// copy as columns (kernels/sparse/sparse.h) in the memory that the block has for them as rows: nothing turns
// them to rows and back.
namespace encast {

// The only step that reads value `id` of a block; or null.
inline const StepDecl* only_reader(const Plan& plan, int id) {
  if (!plan.values[static_cast<size_t>(id)].in_block) return nullptr;
  const StepDecl* found = nullptr;
  for (const StepDecl& step : plan.steps) {
    if (step.x != id && step.other != id) continue;
    if (found != nullptr) return nullptr;
    found = &step;
  }
  return found;
}

// The step that narrows what `product` makes, where both may be columns; or null. It is the next one, so that
// the extremes that it is given are still in the thread's scratch.
inline const StepDecl* narrows_columns(const Plan& plan, const StepDecl& product) {
  const bool coarse = product.coarse && !plan.exact && has_coarse_form(product.act);
  if (product.kind != StepKind::sparse || product.other >= 0 || plan.block_rows < kTileRows ||
      plan.values[static_cast<size_t>(product.out)].cols % kBlockOutputs != 0 ||
      (product.act != Activation::none && !coarse) ||
      select_kernel("sparse_q8s8_columns", product.arithmetic, kTileRows) == nullptr ||
      select_kernel("narrow_columns", "f32", kTileRows) == nullptr) {
    return nullptr;
  }
  const StepDecl* const narrow = only_reader(plan, product.out);
  if (narrow == nullptr || narrow != &product + 1 || narrow->kind != StepKind::narrow ||
      narrow->q8_scale > 0 || plan.values[static_cast<size_t>(narrow->out)].dtype != DType::q8) {
    return nullptr;
  }
  const StepDecl* const reader = only_reader(plan, narrow->out);
  return reader != nullptr && reader->kind == StepKind::sparse ? narrow : nullptr;
}

// Whether value `id` may be columns that were narrowed.
inline bool may_be_columns(const Plan& plan, int id) {
  const auto narrow = std::ranges::find_if(plan.steps, [&](const StepDecl& step) { return step.out == id; });
  return narrow != plan.steps.begin() && narrow != plan.steps.end() &&
         narrows_columns(plan, *(narrow - 1)) == &*narrow;
}

// Least rows of columns. Up to half a tile, products have narrower forms, and columns have not; with as few
// rows as some product is dense for, it makes and reads rows.
inline int64_t least_columns(const Plan& plan) {
  int64_t most_without = kTileRows / 2;
  for (const StepDecl& step : plan.steps) most_without = std::max<int64_t>(most_without, step.dense_rows);
  return most_without + 1;
}

// Whether values that may be columns are, for the rows of a share.
inline bool keeps_columns(const Share& share, int64_t least) {
  const int64_t rows = share.rows.end - share.rows.begin;
  return share.parts == 1 && rows >= least && rows <= kTileRows;
}

// Value `id` as a product's columns, in the memory of the share's rows; extremes lie at the begin of its
// scratch, where sparse products that make rows have their sums.
inline ColumnsOut columns_of(const Share& share, int id) {
  const Place& values = place(share, id);
  auto* const extremes = reinterpret_cast<float*>(share.scratch);
  return {reinterpret_cast<float*>(values.data) + share.rows.begin * values.stride, extremes,
          extremes + kTileRows};
}

}  // namespace encast
