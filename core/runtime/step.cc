#include "runtime/step.h"

#include "runtime/steps/step_type.h"

namespace encast {
namespace {

struct NamedType {
  const char* name;
  const StepType* type;
};
constexpr NamedType kStepTypes[] = {
#define ENCAST_STEP(kind) {#kind, &step_types::kind},
#include "runtime/steps/steps.inc"
#undef ENCAST_STEP
};

}  // namespace

const StepType& step_type(StepKind kind) { return *kStepTypes[static_cast<size_t>(kind)].type; }
const char* step_name(StepKind kind) { return kStepTypes[static_cast<size_t>(kind)].name; }
const char* step_keys(StepKind kind) { return step_type(kind).keys; }

std::optional<StepKind> step_kind(std::string_view name) {
  for (size_t index = 0; index < std::size(kStepTypes); ++index) {
    if (name == kStepTypes[index].name) return static_cast<StepKind>(index);
  }
  return std::nullopt;
}

std::unique_ptr<Step> bind_step(const Plan& plan, size_t index, const std::byte* weights) {
  const StepDecl& step = plan.steps[index];
  return step_type(step.kind).bind(Binder(plan, weights), step, index);
}

}  // namespace encast
