#include "kernels/reduce/reduce.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_gather(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.need(x.rows == Rows::tokens, "gathers from rows that are not tokens");
  check.write_f32(step.out, step.kind == StepKind::first ? Rows::seqs : Rows::selected, x.cols);
}

class GatherStep final : public RowStep<GatherFn> {
 public:
  GatherStep(const Binder& binder, const StepDecl& decl) : RowStep(binder, decl, "gather_rows") {}

  void run(const Share& share) const override {
    auto args = operands<GatherArgs>(share);
    args.rows =
        decl_.kind == StepKind::first ? share.chunk.first_rows.data() : share.chunk.selected_rows.data();
    run_rows(args, share);
  }
};

}  // namespace

const StepType step_types::first = {"x out", &check_gather, &bind_as<GatherStep>};
const StepType step_types::select = {"x out", &check_gather, &bind_as<GatherStep>};

}  // namespace encast
