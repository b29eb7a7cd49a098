#pragma once
#include "runtime/steps/step_type.h"

namespace encast {

// The form of Binder::narrow_form with the memory that it goes to.
inline NarrowOut narrow_out(const Share& share, int id, NarrowOut form) {
  if (form.kind == NarrowOut::Kind::none) return form;
  const Place& to = place(share, id);
  form.data = to.data;
  form.stride = to.stride;
  form.scale = to.scale;
  form.zero = to.zero;
  return form;
}

// Steps whose kernels take [begin, end) of rows of one kind.
template <class Fn>
class RowStep : public Step {
 protected:
  RowStep(const Binder& binder, const StepDecl& decl, const char* op)
      : decl_(decl), binder_(binder), select_(op, "f32", &kernels_) {}

  // The operands that all of them have.
  template <class Args>
  Args operands(const Share& share) const {
    Args args;
    args.cols = binder_.value(decl_.x).cols;
    args.x = f32_in(share, decl_.x);
    args.x_stride = stride(share, decl_.x);
    if constexpr (requires { args.out_stride; }) {
      args.out = f32_out(share, decl_.out);
      args.out_stride = stride(share, decl_.out);
    }
    return args;
  }

  template <class Args>
  void run_rows(const Args& args, const Share& share) const {
    const Range range = split(share.rows, 1, share.part, share.parts);
    if (range.begin < range.end) select_(range.end - range.begin)(args, range.begin, range.end);
  }

  const StepDecl decl_;
  const Binder binder_;
  Selection<Fn> select_;
};

}  // namespace encast
