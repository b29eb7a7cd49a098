#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "runtime/plan.h"

// Any text either parses to a plan that keeps the rules or is refused with a PlanError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const encast::Plan plan = encast::Plan::parse({reinterpret_cast<const char*>(data), size});
    plan.check_weights(size);
  } catch (const encast::PlanError&) {
  }
  return 0;
}
