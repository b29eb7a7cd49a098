#include "kernels/gated/gated.h"

#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_gated(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.need(x.cols % 2 == 0, "reads a value whose columns have no halves");
  check.write_f32(step.out, x.rows, x.cols / 2);
  if (step.also >= 0) check.write_narrow(step.also, x.rows, x.cols / 2);
}

class GatedStep final : public RowStep<GatedFn> {
 public:
  GatedStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "gated_rows"), form_(binder.narrow_form(decl.also, decl)) {}

  void run(const Share& share) const override {
    auto args = operands<GatedArgs>(share);
    args.cols /= 2;
    args.activation = decl_.act;
    args.exact = binder_.exact();
    args.narrow = narrow_out(share, decl_.also, form_);
    run_rows(args, share);
  }

 private:
  const NarrowOut form_;
};

}  // namespace

const StepType step_types::gated = {"x act out also? zero_point? q8_scale? q8_zero?", &check_gated,
                                    &bind_as<GatedStep>};

}  // namespace encast
