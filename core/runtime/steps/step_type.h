#pragma once
#include <memory>
#include <type_traits>

#include "runtime/binding.h"
#include "runtime/steps/step_check.h"

namespace encast {

// What a kind of step is. A kind NAME of steps.inc has a `const StepType step_types::NAME` in a file of
// this folder.
struct StepType {
  // In a plan's text; a trailing ? marks an optional one. Every step may have name=. Keys that no kind had
  // before are a member of StepDecl and a row of kStepKeys (step_keys.h).
  const char* keys;
  // Throws PlanError, through `check`, for operands and numbers that the kind does not take.
  void (*check)(StepCheck& check, const StepDecl& step);
  // Step `index` of the binder's plan.
  std::unique_ptr<Step> (*bind)(const Binder& binder, const StepDecl& step, size_t index);
};

namespace step_types {
#define ENCAST_STEP(kind) extern const StepType kind;
#include "runtime/steps/steps.inc"
#undef ENCAST_STEP
}  // namespace step_types

const StepType& step_type(StepKind kind);

// `bind` of a class made from (binder, step) or (binder, step, index).
template <class S>
std::unique_ptr<Step> bind_as(const Binder& binder, const StepDecl& step, size_t index) {
  if constexpr (std::is_constructible_v<S, const Binder&, const StepDecl&, size_t>) {
    return std::make_unique<S>(binder, step, index);
  } else {
    return std::make_unique<S>(binder, step);
  }
}

}  // namespace encast
