#include "kernels/elementwise/elementwise.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_elementwise(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  if (step.other >= 0)
    check.need(check.same(x, check.read(step.other, DType::f32)), "adds values of unlike shapes");
  const ValueDecl& out = check.write_part(step.out, x.rows, step.column, x.cols);
  check.need(out.dtype == DType::f32, "makes a value of the wrong dtype");
}

class ElementwiseStep final : public RowStep<ElementwiseFn> {
 public:
  ElementwiseStep(const Binder& binder, const StepDecl& decl) : RowStep(binder, decl, "elementwise_rows") {}

  void run(const Share& share) const override {
    auto args = operands<ElementwiseArgs>(share);
    args.other = f32_in(share, decl_.other);
    args.other_stride = stride(share, decl_.other);
    args.factor = decl_.factor;
    args.activation = decl_.act;
    args.exact = binder_.exact();
    args.out += decl_.column;
    run_rows(args, share);
  }
};

}  // namespace

const StepType step_types::elementwise = {"x other? factor act column? out", &check_elementwise,
                                          &bind_as<ElementwiseStep>};

}  // namespace encast
