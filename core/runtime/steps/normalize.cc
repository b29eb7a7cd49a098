#include "kernels/reduce/reduce.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_normalize(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.write_f32(step.out, x.rows, x.cols);
}

class NormalizeStep final : public RowStep<NormalizeFn> {
 public:
  NormalizeStep(const Binder& binder, const StepDecl& decl) : RowStep(binder, decl, "normalize_rows") {}

  void run(const Share& share) const override {
    auto args = operands<NormalizeArgs>(share);
    run_rows(args, share);
  }
};

}  // namespace

const StepType step_types::normalize = {"x out", &check_normalize, &bind_as<NormalizeStep>};

}  // namespace encast
