#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"
#include "runtime/plan.h"

namespace encast {

// Goes through a plan's steps with what those before have made, and refuses with the step's number and name.
class StepCheck {
 public:
  explicit StepCheck(const Plan& plan) : plan_(plan), made_(plan.values.size(), 0) {}

  const Plan& plan() const { return plan_; }
  // The next step that is checked.
  void at(size_t index) { index_ = index; }

  [[noreturn]] void fail(const std::string& what) const {
    const StepDecl& step = plan_.steps[index_];
    throw PlanError("plan step " + std::to_string(index_) + " (" + step_name(step.kind) + " " +
                    step.name.substr(0, 80) + "): " + what);
  }
  void need(bool condition, const char* what) const {
    if (!condition) fail(what);
  }

  bool is_made(int id) const {
    return made_[static_cast<size_t>(id)] == plan_.values[static_cast<size_t>(id)].cols;
  }
  const ValueDecl& read(int id, DType dtype) const {
    need(id >= 0 && is_made(id), "reads a value that no step before it makes");
    const ValueDecl& value = plan_.values[static_cast<size_t>(id)];
    need(value.dtype == dtype, "reads a value of the wrong dtype");
    need(value.offset != ValueDecl::kCallerMemory, "reads a value that lies in the caller's memory");
    return value;
  }
  const ValueDecl& write(int id, Rows rows, int64_t cols) {
    need(id >= 0, "writes no value");
    const ValueDecl& value = plan_.values[static_cast<size_t>(id)];
    need(made_[static_cast<size_t>(id)] == 0, "makes a value a second time");
    need(value.rows == rows && value.cols == cols, "makes a value of the wrong shape");
    made_[static_cast<size_t>(id)] = cols;
    return value;
  }
  // A part of a value's columns. Parts come side by side, so that none is left as the memory was.
  const ValueDecl& write_part(int id, Rows rows, int64_t column, int64_t cols) {
    need(id >= 0, "writes no value");
    const ValueDecl& value = plan_.values[static_cast<size_t>(id)];
    int64_t& made = made_[static_cast<size_t>(id)];
    need(value.rows == rows, "makes a value of the wrong shape");
    need(column == made && made + cols <= value.cols, "makes columns other than the next ones of the value");
    made += cols;
    return value;
  }
  void write_f32(int id, Rows rows, int64_t cols) {
    need(write(id, rows, cols).dtype == DType::f32, "makes a value of the wrong dtype");
  }
  void write_narrow(int id, Rows rows, int64_t cols) {
    const int out = plan_.steps[index_].out;
    need(out == id || plan_.values[static_cast<size_t>(out)].offset != ValueDecl::kCallerMemory,
         "makes a narrow copy of a value in the caller's memory");
    const ValueDecl& value = write(id, rows, cols);
    need(value.dtype != DType::f32, "makes a narrow copy that is f32");
    const StepDecl& step = plan_.steps[index_];
    need(step.q8_scale == 0 || value.dtype == DType::q8,
         "has a q8_scale and makes a narrow copy that is not q8");
    need(step.q8_scale == 0 || (std::isnormal(step.q8_scale) && step.q8_scale > 0),
         "has a q8_scale that is no normal number above 0");
    need(step.q8_scale != 0 || step.q8_zero == 0, "has a q8_zero without a q8_scale");
    need(step.q8_scale == 0 || !step.zero_point, "has both zero points of its rows and a q8_scale");
    need(value.offset != ValueDecl::kCallerMemory, "makes a narrow copy in the caller's memory");
  }
  const WeightDecl& weight(int id, DType dtype, WeightLayout layout) const {
    need(id >= 0, "lacks a weight");
    const WeightDecl& found = plan_.weights[static_cast<size_t>(id)];
    need(found.dtype == dtype && found.layout == layout, "has a weight of the wrong dtype or layout");
    return found;
  }
  void vector(int id, DType dtype, WeightLayout layout, int64_t cols) const {
    const WeightDecl& found = weight(id, dtype, layout);
    need(found.rows == 1 && found.cols == cols, "has a vector of the wrong size");
  }
  void norm_vectors(const StepDecl& step, int64_t cols) const {
    vector(step.gamma, DType::f32, WeightLayout::dense, cols);
    if (step.beta >= 0) vector(step.beta, DType::f32, WeightLayout::dense, cols);
    need(step.eps >= 0, "has a negative eps");
  }

  static bool same(const ValueDecl& a, const ValueDecl& b) { return a.rows == b.rows && a.cols == b.cols; }

 private:
  const Plan& plan_;
  size_t index_ = 0;
  std::vector<int64_t> made_;  // columns of every value that steps have made
};

}  // namespace encast
