#include "kernels/quantize/quantize.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_narrow(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.write_narrow(step.out, x.rows, x.cols);
}

class NarrowStep final : public RowStep<NarrowFn> {
 public:
  NarrowStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "narrow_rows"), form_(binder.narrow_form(decl.out, decl)) {}

  void run(const Share& share) const override {
    auto args = operands<NarrowArgs>(share);
    args.out = narrow_out(share, decl_.out, form_);
    run_rows(args, share);
  }

 private:
  const NarrowOut form_;
};

}  // namespace

const StepType step_types::narrow = {"x zero_point q8_scale? q8_zero? out", &check_narrow,
                                     &bind_as<NarrowStep>};

}  // namespace encast
