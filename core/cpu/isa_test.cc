#include "cpu/isa.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"
#include "cpu/features.h"
#include "testing/check.h"

namespace encast {
namespace {

// A processor with everything that the table can ask for.
CpuidFacts everything() {
  CpuidFacts facts;
  facts.leaf1 = facts.leaf7_0 = facts.leaf7_1 = {~0u, ~0u, ~0u, ~0u};
  facts.xcr0 = ~uint64_t{0};
  facts.tile_permission = true;
  return facts;
}

ENCAST_TEST(every_feature_of_the_table_is_decoded) {
  for (const IsaInfo& level : isa_levels()) CHECK_EQ(missing_features(everything(), level.features), "");
  CHECK_EQ(missing_features(everything(), "avx2 avx1024"), "avx1024");
}

ENCAST_TEST(nothing_is_there_without_bits) {
  CHECK_EQ(missing_features({}, "avx2 fma f16c"), "avx2 fma f16c");
  CHECK_EQ(missing_features({}, ""), "");
}

ENCAST_TEST(registers_must_be_saved_by_the_system) {
  CpuidFacts facts = everything();
  facts.xcr0 = 0x7;
  CHECK(has_feature(facts, "avx2") && has_feature(facts, "avxvnni"));
  CHECK(!has_feature(facts, "avx512f") && !has_feature(facts, "avx512bf16") &&
        !has_feature(facts, "amxtile"));
  facts.xcr0 = 0xe7;
  CHECK(has_feature(facts, "avx512vl") && !has_feature(facts, "amxint8"));
  facts.xcr0 = 0x3;
  CHECK_EQ(missing_features(facts, "avx2 fma f16c"), "avx2 fma f16c");
}

ENCAST_TEST(tiles_need_the_kernels_permission) {
  CpuidFacts facts = everything();
  facts.tile_permission = false;
  CHECK_EQ(missing_features(facts, "avx512f amxtile amxint8 amxbf16"), "amxtile amxint8 amxbf16");
}

// Haswell, from its data sheet: AVX2, FMA and F16C, and nothing after.
ENCAST_TEST(haswell_stops_at_avx2) {
  CpuidFacts facts;
  facts.leaf1.ecx = 0x7ffafbff;
  facts.leaf7_0.ebx = 0x000027ab;
  facts.xcr0 = 0x7;
  std::string usable;
  for (const IsaInfo& level : isa_levels())
    if (missing_features(facts, level.features).empty()) usable += std::string(level.name) + " ";
  CHECK_EQ(usable, "scalar avx2 ");
}

// Leaf 0 as the vendors' manuals give it.
ENCAST_TEST(what_is_slow_on_one_vendor_alone) {
  CpuidFacts facts = everything();
  facts.leaf0 = {.eax = 31, .ebx = 0x756e6547, .ecx = 0x6c65746e, .edx = 0x49656e69};
  CHECK(slow_bf16_dot(facts));
  CHECK(!two_shuffle_ports(facts));
  facts.leaf0 = {.eax = 16, .ebx = 0x68747541, .ecx = 0x444d4163, .edx = 0x69746e65};
  CHECK(!slow_bf16_dot(facts));
  CHECK(two_shuffle_ports(facts));
}

// The vendor by the kernel's reading of leaf 0.
ENCAST_TEST(a_slow_level_may_run_and_is_not_the_best_unless_named) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line) && line.rfind("vendor_id", 0) != 0) continue;
  if (line.empty()) SKIP_TEST("/proc/cpuinfo names no vendor");
  const bool intel = line.ends_with("GenuineIntel");
  CHECK_EQ(slow_bf16_dot(read_cpuid()), intel);
  const char* forced = std::getenv("ENCAST_ISA");
  if (forced != nullptr && *forced != '\0') SKIP_TEST("ENCAST_ISA is set");
  const IsaInfo& level = isa_levels()[static_cast<size_t>(Isa::avx512bf16)];
  CHECK_EQ(!level.slow.empty(), intel && level.missing.empty());
  CHECK_EQ(isa_allowed(level.isa), level.missing.empty());
  if (!level.slow.empty()) CHECK(isa_best() != level.isa);
}

// /proc/cpuinfo is the kernel's own reading of CPUID, without the features whose registers it does not save.
ENCAST_TEST(the_kernel_agrees_about_this_processor) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line) && line.rfind("flags", 0) != 0) continue;
  if (line.empty()) SKIP_TEST("/proc/cpuinfo lists no flags");
  std::istringstream words(line);
  const std::set<std::string> flags{std::istream_iterator<std::string>(words), {}};
  const CpuidFacts facts = read_cpuid();
  const std::pair<const char*, const char*> names[] = {{"avx2", "avx2"},
                                                       {"fma", "fma"},
                                                       {"f16c", "f16c"},
                                                       {"avx512f", "avx512f"},
                                                       {"avx512bw", "avx512bw"},
                                                       {"avx512dq", "avx512dq"},
                                                       {"avx512vl", "avx512vl"},
                                                       {"avxvnni", "avx_vnni"},
                                                       {"avx512vnni", "avx512_vnni"},
                                                       {"avx512bf16", "avx512_bf16"}};
  for (const auto& [ours, theirs] : names) CHECK_EQ(has_feature(facts, ours), flags.contains(theirs), ours);
}

ENCAST_TEST(levels_follow_the_table) {
  CHECK_EQ(isa_levels().front().name, "scalar");
  CHECK(isa_allowed(Isa::scalar));
  for (const IsaInfo& level : isa_levels()) CHECK_EQ(isa_name(level.isa), level.name);
}

// The environment is read once, so a forced level is the business of a process of its own: CTest runs
// this program again with ENCAST_ISA set (see cmake/tests.cmake).
ENCAST_TEST(a_forced_level_is_the_best_one) {
  const char* forced = std::getenv("ENCAST_ISA");
  if (forced == nullptr) SKIP_TEST("ENCAST_ISA is not set");
  for (const IsaInfo& level : isa_levels()) {
    if (level.name != std::string(forced)) continue;
    if (level.missing.empty()) {
      CHECK_EQ(isa_name(isa_best()), forced);
      for (const IsaInfo& other : isa_levels()) CHECK(!isa_allowed(other.isa) || other.isa <= level.isa);
    } else {
      CHECK_THROWS(isa_best(), ResourceError, level.missing);
    }
    return;
  }
  CHECK_THROWS(isa_best(), ResourceError, "is no level; this machine accepts scalar");
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
