#include "parallel/partition.h"
#include "runtime/steps/step_type.h"

namespace encast {
namespace {

void check_linear(StepCheck& check, const StepDecl& step) {
  check.need(step.x >= 0, "lacks x");
  const DType dtype = check.plan().values[static_cast<size_t>(step.x)].dtype;
  const ValueDecl& x = check.read(step.x, dtype);
  const WeightDecl& w = check.weight(step.w, dtype == DType::q8 ? DType::s8 : dtype, WeightLayout::panels);
  check.need(w.cols == x.cols, "multiplies values of unlike inner sizes");
  check.need((dtype == DType::q8) == (step.scale >= 0) && (dtype == DType::q8) == (step.colsum >= 0),
             "needs scale and colsum for q8, and neither otherwise");
  if (dtype == DType::q8) {
    // 255 * 127 * k must fit an int32 sum.
    check.need(w.cols <= 65536, "has an inner size whose integer sums may overflow");
    check.vector(step.scale, DType::f32, WeightLayout::padded, w.rows);
    check.vector(step.colsum, DType::i32, WeightLayout::padded, w.rows);
  }
  if (step.bias >= 0) check.vector(step.bias, DType::f32, WeightLayout::padded, w.rows);
  // Read before the output is made, so that it is not the output.
  if (step.other >= 0) {
    const ValueDecl& other = check.read(step.other, DType::f32);
    check.need(step.column == 0 && other.rows == x.rows && other.cols == w.rows,
               "adds a value of another shape");
  }
  // Kernels write whole panels, and fill the padding of narrow rows after the last one.
  check.need(step.column % kPanel == 0, "makes columns that do not begin a panel");
  const ValueDecl& out = check.write_part(step.out, x.rows, step.column, w.rows);
  check.need(out.dtype == DType::f32 || out.dtype == DType::bf16, "makes a value of the wrong dtype");
}

class LinearStep final : public Step {
 public:
  LinearStep(const Binder& binder, const StepDecl& decl, size_t index)
      : decl_(decl),
        binder_(binder),
        next_w_(binder.next_weight(index)),
        rounds_(binder.value(decl.out).dtype == DType::bf16),
        select_(gemm_op(binder.value(decl.x).dtype), decl.arithmetic, &kernels_) {
    tiles_ = select_.tiles();
  }

  void run(const Share& share) const override {
    GemmArgs args = product_args(binder_, decl_, share);
    if (rounds_) {
      args.c_bf16 = reinterpret_cast<uint16_t*>(place(share, decl_.out).data) + decl_.column;
    } else {
      args.c = f32_out(share, decl_.out) + decl_.column;
    }
    args.c_stride = stride(share, decl_.out);
    const Tile tile = tile_of(decl_.w, share);
    const int64_t next_panel = binder_.panel_bytes(next_w_);
    const Range next_panels = tile_of(next_w_, share).panels;
    args.next_w = binder_.data<std::byte>(next_w_) + next_panels.begin * next_panel;
    args.next_w_bytes = next_panel;
    args.next_w_panels = next_panels.end - next_panels.begin;
    if (tile.rows.begin < tile.rows.end && tile.panels.begin < tile.panels.end) {
      select_(share.rows.end - share.rows.begin)(args, tile.rows.begin, tile.rows.end, tile.panels.begin,
                                                 tile.panels.end);
    }
  }

 private:
  Tile tile_of(int weight, const Share& share) const {
    return split_product(share.rows, binder_.panels(weight), share.part, share.parts, tiles());
  }

  const StepDecl decl_;
  const Binder binder_;
  const int next_w_;
  const bool rounds_;  // its outputs to bf16
  Selection<GemmFn> select_;
};

}  // namespace

const StepType step_types::linear = {"x other? w scale? colsum? bias? act coarse? arithmetic column? out",
                                     &check_linear, &bind_as<LinearStep>};

}  // namespace encast
