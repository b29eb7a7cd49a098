#include "cpu/isa.h"

#include <cstdlib>
#include <string_view>

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

std::vector<IsaInfo> detect() {
  const CpuidFacts facts = read_cpuid();
  std::vector<IsaInfo> levels;
  for (const Row& row : kRows) {
    levels.push_back(
        {static_cast<Isa>(levels.size()), row.name, row.features, missing_features(facts, row.features), ""});
  }
  IsaInfo& bf16 = levels[static_cast<size_t>(Isa::avx512bf16)];
  if (bf16.missing.empty() && slow_bf16_dot(facts))
    bf16.slow = "vdpbf16ps is slower here than f32 products of widened bf16";
  return levels;
}

// What ENCAST_ISA lets through: levels up to `last`, which is the one that it names if `named`.
struct Ceiling {
  size_t last;
  bool named;
};

Ceiling read_ceiling() {
  const std::vector<IsaInfo>& levels = isa_levels();
  const char* text = std::getenv("ENCAST_ISA");
  if (text == nullptr || *text == '\0') return {levels.size() - 1, false};
  std::string usable;
  for (size_t i = 0; i < levels.size(); ++i) {
    const bool runs = levels[i].missing.empty();
    if (runs) usable += (usable.empty() ? "" : ", ") + std::string(levels[i].name);
    if (std::string_view(text) != levels[i].name) continue;
    if (runs) return {i, true};
    throw ResourceError("ENCAST_ISA=" + std::string(text) +
                        ": this processor or its operating system lacks " + levels[i].missing +
                        "; run `encast doctor` for the levels that it has");
  }
  throw ResourceError("ENCAST_ISA=" + std::string(text) + " is no level; this machine accepts " + usable +
                      "; unset it to let encast choose");
}

const Ceiling& ceiling() {
  static const Ceiling read = read_ceiling();
  return read;
}

}  // namespace

const std::vector<IsaInfo>& isa_levels() {
  static const std::vector<IsaInfo> levels = detect();
  return levels;
}

bool isa_allowed(Isa isa) {
  const size_t index = static_cast<size_t>(isa);
  return index <= ceiling().last && isa_levels()[index].missing.empty();
}

bool two_shuffle_ports() {
  static const bool two = two_shuffle_ports(read_cpuid());
  return two;
}

Isa isa_best() {
  Isa best = Isa::scalar;
  for (const IsaInfo& level : isa_levels()) {
    const bool named = ceiling().named && static_cast<size_t>(level.isa) == ceiling().last;
    if (isa_allowed(level.isa) && (level.slow.empty() || named)) best = level.isa;
  }
  return best;
}

const char* isa_name(Isa isa) { return kRows[static_cast<size_t>(isa)].name; }

}  // namespace encast
