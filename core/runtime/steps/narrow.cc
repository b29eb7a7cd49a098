#include <memory>

#include "kernels/quantize/quantize.h"
#include "kernels/sparse/sparse.h"
#include "runtime/columns.h"
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
      : RowStep(binder, decl, "narrow_rows"),
        form_(binder.narrow_form(decl.out, decl)),
        least_columns_(least_columns(binder.plan())) {
    if (may_be_columns(binder.plan(), decl.out))
      columns_ = std::make_unique<const Selection<NarrowColumnsFn>>("narrow_columns", "f32", &kernels_);
  }

  void run(const Share& share) const override {
    if (columns_ != nullptr && keeps_columns(share, least_columns_)) return run_columns(share);
    auto args = operands<NarrowArgs>(share);
    args.out = narrow_out(share, decl_.out, form_);
    run_rows(args, share);
  }

 private:
  void run_columns(const Share& share) const {
    const Place& to = place(share, decl_.out);
    const int64_t first = share.rows.begin, rows = share.rows.end - first;
    NarrowColumnsArgs args{.rows = rows, .cols = binder_.value(decl_.x).cols};
    args.from = columns_of(share, decl_.x);
    args.symmetric = form_.kind == NarrowOut::Kind::q8_symmetric;
    args.codes = reinterpret_cast<uint8_t*>(to.data) + first * to.stride;
    args.scale = to.scale + first;
    args.zero = to.zero + first;
    (*columns_)(rows)(args);
  }

  const NarrowOut form_;
  const int64_t least_columns_;
  std::unique_ptr<const Selection<NarrowColumnsFn>> columns_;
};

}  // namespace

const StepType step_types::narrow = {"x zero_point q8_scale? q8_zero? out", &check_narrow,
                                     &bind_as<NarrowStep>};

}  // namespace encast
