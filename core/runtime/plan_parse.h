#pragma once
#include <string_view>

#include "runtime/plan.h"

namespace encast {

// The grammar: text to declarations. Ranges of numbers are checked here, their meaning in validate_plan.
Plan parse_plan(std::string_view text);

// The meaning: operands, shapes, order, memory. Throws PlanError naming the step.
void validate_plan(const Plan& plan);

}  // namespace encast
