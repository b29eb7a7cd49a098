#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace encast {

enum class Isa : uint8_t {
#define ENCAST_ISA(name, features, flags) name,
#include "cpu/isa.inc"
#undef ENCAST_ISA
};

struct IsaInfo {
  Isa isa;
  const char* name;
  const char* features;  // space separated, as the table writes them
  std::string missing;   // the features this processor or kernel lacks; empty when usable
  std::string slow;      // why earlier levels are faster on this processor; empty where they are not
};

// All levels, in the table's order. Detection (CPUID, XCR0 and, for AMX, the kernel's permission)
// runs once.
const std::vector<IsaInfo>& isa_levels();

// True if this processor can run the level and ENCAST_ISA does not forbid it.
// ENCAST_ISA=NAME allows the named level and those above it in the table.
// An unknown or unusable name throws ResourceError, which lists what would be accepted.
bool isa_allowed(Isa isa);

// The last allowed level of the table; a slow one only if ENCAST_ISA names it. Levels beyond it may run, but
// arithmetic classes of theirs are not chosen.
Isa isa_best();

const char* isa_name(Isa isa);

// See cpu/features.h; asked once.
bool two_shuffle_ports();

}  // namespace encast
