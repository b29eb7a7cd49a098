#include <memory>

#include "kernels/sparse/sparse.h"

#include "base/error.h"
#include "kernels/sparse/check.h"
#include "parallel/partition.h"
#include "runtime/columns.h"
#include "runtime/steps/step_type.h"

namespace encast {
namespace {

void check_sparse(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::q8);
  // 255 * 128 * k must fit an int32 sum, and columns have 16 bits.
  check.need(x.cols <= kMostSparseInputs, "has an inner size whose integer sums may overflow");
  const int64_t outputs = check.weight(step.scale, DType::f32, WeightLayout::padded).cols;
  check.vector(step.scale, DType::f32, WeightLayout::padded, outputs);
  check.vector(step.colsum, DType::i32, WeightLayout::padded, outputs);
  if (step.bias >= 0) check.vector(step.bias, DType::f32, WeightLayout::padded, outputs);
  const WeightDecl& w = check.weight(step.w, DType::s8, WeightLayout::dense);
  const WeightDecl& columns = check.weight(step.columns, DType::u16, WeightLayout::dense);
  check.need(w.cols == kBlockOutputs * kGroupInputs && columns.cols == kGroupInputs && columns.rows == w.rows,
             "has groups and columns that do not fit each other");
  check.vector(step.starts, DType::i32, WeightLayout::dense, sparse_blocks(outputs) + 1);
  check.need((step.dense >= 0) == (step.dense_rows > 0), "needs dense and dense_rows, or neither");
  if (step.dense >= 0) {
    const WeightDecl& dense = check.weight(step.dense, DType::s8, WeightLayout::panels);
    check.need(dense.rows == outputs && dense.cols == x.cols, "has panels of another shape");
  }
  if (step.other >= 0) {
    const ValueDecl& other = check.read(step.other, DType::f32);
    check.need(other.rows == x.rows && other.cols == outputs, "adds a value of another shape");
  }
  check.write_f32(step.out, x.rows, outputs);
}

class SparseStep final : public Step {
 public:
  // What the weights file holds is checked here: kernels follow its numbers without looking.
  SparseStep(const Binder& binder, const StepDecl& decl, size_t index)
      : decl_(decl),
        binder_(binder),
        outputs_(binder.weight(decl.scale).cols),
        select_("sparse_q8s8", decl.arithmetic, &kernels_),
        least_columns_(least_columns(binder.plan())),
        reads_columns_(may_be_columns(binder.plan(), decl.x)) {
    rows_together_ = kTileRows;
    if (narrows_columns(binder.plan(), binder.plan().steps[index]) != nullptr) {
      to_columns_ =
          std::make_unique<const Selection<SparseFn>>("sparse_q8s8_columns", decl.arithmetic, &kernels_);
    }
    if (decl.dense >= 0) {
      dense_ = step_types::linear.bind(binder, dense_form(decl), index);
      kernels_.insert(kernels_.end(), dense_->kernels().begin(), dense_->kernels().end());
    }
    const std::string problem = sparse_problem(sparse_weight(binder, decl), binder.weight(decl.w).rows,
                                               outputs_, binder.value(decl.x).cols);
    if (!problem.empty()) {
      throw ArtifactError("the sparse weight of " + decl.name.substr(0, 80) + ": " + problem +
                          "; the file is damaged: compile the artifact again");
    }
  }

  void run(const Share& share) const override {
    if (keeps_columns(share, least_columns_)) return run_sparse(share, share.rows, true);
    const SparseRows rows(decl_, share.rows, share.parts);
    if (rows.sparse.begin < rows.sparse.end) run_sparse(share, rows.sparse, false);
    if (rows.dense.begin < rows.dense.end) {
      Share rest = share;
      rest.rows = rows.dense;
      dense_->run(rest);
    }
  }

 private:
  // `columns`: whether values that may be columns are.
  void run_sparse(const Share& share, Range rows, bool columns) const {
    SparseArgs args = sparse_args(binder_, decl_, share, share.scratch);
    const int64_t count = rows.end - rows.begin;
    if (columns && reads_columns_) {
      const Place& from = place(share, decl_.x);
      args.features = reinterpret_cast<uint8_t*>(from.data) + rows.begin * from.stride;
      args.turned = true;
    }
    const int64_t panels = round_up(outputs_, kPanel) / kPanel;
    if (columns && to_columns_ != nullptr) {
      args.columns = columns_of(share, decl_.out);
      return (*to_columns_)(count)(args, rows.begin, rows.end, 0, panels);
    }
    args.product.c = f32_out(share, decl_.out);
    args.product.c_stride = stride(share, decl_.out);
    const Tile tile = split_product(rows, panels, share.part, share.parts, false);
    if (tile.rows.begin < tile.rows.end && tile.panels.begin < tile.panels.end) {
      select_(count)(args, tile.rows.begin, tile.rows.end, tile.panels.begin, tile.panels.end);
    }
  }

  const StepDecl decl_;
  const Binder binder_;
  const int64_t outputs_;
  Selection<SparseFn> select_;
  std::unique_ptr<const Selection<SparseFn>> to_columns_;
  std::unique_ptr<const Step> dense_;  // of few rows
  const int64_t least_columns_;
  const bool reads_columns_;
};

}  // namespace

const StepType step_types::sparse = {
    "x other? w columns starts scale colsum bias? act coarse? arithmetic dense? dense_rows? out",
    &check_sparse, &bind_as<SparseStep>};

}  // namespace encast
