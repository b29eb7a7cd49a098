#include "kernels/reduce/reduce.h"
#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_pool(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.need(x.rows == Rows::tokens, "pools rows that are not tokens");
  const ValueDecl& out = check.write_part(step.out, Rows::seqs, step.column, x.cols);
  check.need(out.dtype == DType::f32, "makes a value of the wrong dtype");
}

class PoolStep final : public RowStep<PoolFn> {
 public:
  PoolStep(const Binder& binder, const StepDecl& decl) : RowStep(binder, decl, "pool_rows") {}

  void run(const Share& share) const override {
    auto args = operands<PoolArgs>(share);
    args.cu_seqlens = share.chunk.cu_seqlens.data();
    args.mode = decl_.mode;
    args.out += decl_.column;
    run_rows(args, share);
  }
};

}  // namespace

const StepType step_types::pool = {"x mode column out", &check_pool, &bind_as<PoolStep>};

}  // namespace encast
