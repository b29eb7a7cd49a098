#include <algorithm>
#include <cstring>

#include "runtime/steps/row_step.h"

namespace encast {
namespace {

void check_window(StepCheck& check, const StepDecl& step) {
  const ValueDecl& x = check.read(step.x, DType::f32);
  check.need(x.rows == Rows::tokens, "takes windows of rows that are not tokens");
  const int64_t cols = check.plan().values[static_cast<size_t>(step.out)].cols;
  check.need(cols % x.cols == 0 && cols / x.cols % 2 == 1, "makes rows that are no odd number of rows of x");
  check.write_f32(step.out, Rows::tokens, cols);
}

// Copies, which no level does differently. Its rows are those of other tokens too: no step of its stage may
// make x (plan_validate.cc).
class WindowStep final : public Step {
 public:
  WindowStep(const Binder& binder, const StepDecl& decl)
      : decl_(decl), cols_(binder.value(decl.x).cols), width_(binder.value(decl.out).cols / cols_) {}

  void run(const Share& share) const override {
    const Range rows = split(share.rows, 1, share.part, share.parts);
    const auto starts = share.chunk.cu_seqlens.begin();
    auto after = std::upper_bound(starts, starts + share.chunk.count(Rows::seqs) + 1, rows.begin);
    for (int64_t row = rows.begin; row < rows.end; ++after) {
      const int64_t first = *(after - 1), last = *after;
      for (; row < std::min(last, rows.end); ++row) copy(share, row, first, last);
    }
  }

 private:
  // The window around a row of the sequence [first, last).
  void copy(const Share& share, int64_t row, int64_t first, int64_t last) const {
    const float* x = f32_in(share, decl_.x);
    float* out = f32_out(share, decl_.out) + row * stride(share, decl_.out);
    for (int64_t place = 0; place < width_; ++place, out += cols_) {
      const int64_t from = row + place - width_ / 2;
      if (from >= first && from < last) {
        std::memcpy(out, x + from * stride(share, decl_.x), static_cast<size_t>(cols_) * sizeof(float));
      } else {
        std::fill_n(out, cols_, 0.0f);
      }
    }
  }

  const StepDecl decl_;
  const int64_t cols_, width_;
};

}  // namespace

const StepType step_types::window = {"x out", &check_window, &bind_as<WindowStep>};

}  // namespace encast
