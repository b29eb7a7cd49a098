#include "kernels/rotary/rotary.h"

#include <algorithm>

#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_rotary(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.need(x.rows == Rows::tokens && x.cols % (3 * int64_t{step.heads}) == 0,
             "has columns that are not 3 x heads");
  const int64_t head_dim = x.cols / 3 / step.heads;
  check.need(head_dim % 2 == 0, "has heads of an odd number of columns");
  const WeightDecl& table = check.weight(step.table, DType::f32, WeightLayout::dense);
  check.need(table.cols == head_dim && table.rows >= check.plan().max_len,
             "has a table that is not max_len positions x columns of a head");
  check.need(step.out == step.x, "does not turn its rows in place");
}

class RotaryStep final : public RowStep<RotaryFn> {
 public:
  RotaryStep(const Binder& binder, const StepDecl& decl) : RowStep(binder, decl, "rotary_rows") {}

  void run(const Share& share) const override {
    RotaryArgs args;
    args.x = f32_out(share, decl_.x);
    args.x_stride = stride(share, decl_.x);
    args.heads = 2 * decl_.heads;
    args.head_dim = binder_.value(decl_.x).cols / 3 / decl_.heads;
    args.table = binder_.data<float>(decl_.table);
    const Range rows = split(share.rows, 1, share.part, share.parts);
    const RotaryFn rotate = select_(rows.end - rows.begin);
    // The sequences that the rows belong to.
    const auto starts = share.chunk.cu_seqlens.begin();
    auto after = std::upper_bound(starts, starts + share.chunk.count(Rows::seqs) + 1, rows.begin);
    for (int64_t row = rows.begin; row < rows.end; ++after) {
      const int64_t end = std::min<int64_t>(*after, rows.end);
      args.first = *(after - 1);
      rotate(args, row, end);
      row = end;
    }
  }
};

}  // namespace

const StepType step_types::rotary = {"x table heads out", &check_rotary, &bind_as<RotaryStep>};

}  // namespace encast
