#include "cpu/isa.h"

#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "cpu/features.h"

namespace encast {
namespace {

struct Row {
  const char* name;
  const char* features;
};

constexpr Row kRows[] = {
#define ENCAST_ISA(name, features, flags) {#name, features},
#include "cpu/isa.inc"
#undef ENCAST_ISA
};

std::string_view forced_level() {
  const char* text = std::getenv("ENCAST_ISA");
  return text == nullptr ? "" : text;
}

std::vector<IsaInfo> detect() {
  const CpuidFacts facts = read_cpuid();
  std::vector<IsaInfo> levels;
  for (const Row& row : kRows) {
    const Isa isa = static_cast<Isa>(levels.size());
    std::string missing = missing_features(facts, row.features), slow;
    if (isa == Isa::avx512bf16 && missing.empty() && slow_bf16_dot(facts) && forced_level() != row.name)
      slow = "vdpbf16ps is slower here than f32 products of widened bf16";
    levels.push_back({isa, row.name, row.features, std::move(missing), std::move(slow)});
  }
  return levels;
}

// The index of the last level that ENCAST_ISA lets through.
size_t read_ceiling() {
  const std::vector<IsaInfo>& levels = isa_levels();
  const std::string_view text = forced_level();
  if (text.empty()) return levels.size() - 1;
  std::string usable;
  for (size_t i = 0; i < levels.size(); ++i) {
    const bool runs = levels[i].missing.empty();
    if (runs) usable += (usable.empty() ? "" : ", ") + std::string(levels[i].name);
    if (text != levels[i].name) continue;
    if (runs) return i;
    throw ResourceError("ENCAST_ISA=" + std::string(text) +
                        ": this processor or its operating system lacks " + levels[i].missing +
                        "; run `encast doctor` for the levels that it has");
  }
  throw ResourceError("ENCAST_ISA=" + std::string(text) + " is no level; this machine accepts " + usable +
                      "; unset it to let encast choose");
}

}  // namespace

const std::vector<IsaInfo>& isa_levels() {
  static const std::vector<IsaInfo> levels = detect();
  return levels;
}

bool isa_allowed(Isa isa) {
  static const size_t ceiling = read_ceiling();
  const size_t index = static_cast<size_t>(isa);
  return index <= ceiling && isa_levels()[index].missing.empty();
}

Isa isa_best() {
  Isa best = Isa::scalar;
  for (const IsaInfo& level : isa_levels())
    if (isa_allowed(level.isa) && level.slow.empty()) best = level.isa;
  return best;
}

const char* isa_name(Isa isa) { return kRows[static_cast<size_t>(isa)].name; }

}  // namespace encast
