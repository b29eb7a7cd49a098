#include "kernels/norm/norm.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_norm(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  if (step.other >= 0)
    check.need(check.same(x, check.read(step.other, DType::f32)), "adds values of unlike shapes");
  check.norm_vectors(step, x.cols);
  check.write_f32(step.out, x.rows, x.cols);
  if (step.also >= 0) check.write_narrow(step.also, x.rows, x.cols);
}

class NormStep final : public RowStep<NormFn> {
 public:
  NormStep(const Binder& binder, const StepDecl& decl)
      : RowStep(binder, decl, "norm_rows"), form_(binder.narrow_form(decl.also, decl)) {}

  void run(const Share& share) const override {
    auto args = operands<NormArgs>(share);
    args.residual = f32_in(share, decl_.other);
    args.residual_stride = stride(share, decl_.other);
    args.gamma = binder_.data<float>(decl_.gamma);
    args.beta = binder_.data<float>(decl_.beta);
    args.eps = decl_.eps;
    args.narrow = narrow_out(share, decl_.also, form_);
    run_rows(args, share);
  }

 private:
  const NarrowOut form_;
};

}  // namespace

const StepType step_types::norm = {"x other? gamma beta? eps out also? zero_point? q8_scale? q8_zero?",
                                   &check_norm, &bind_as<NormStep>};

}  // namespace encast
