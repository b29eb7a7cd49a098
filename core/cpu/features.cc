#include "cpu/features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace encast {
namespace {

// XCR0 components (Intel SDM volume 1, section 13.1).
constexpr uint64_t kYmm = 0x6;              // SSE and AVX state
constexpr uint64_t kZmm = kYmm | 0xe0;      // opmask, upper halves, upper sixteen registers
constexpr uint64_t kTile = kYmm | 0x60000;  // tile configuration and tile data

enum class Leaf : uint8_t { leaf1_ecx, leaf7_0_ebx, leaf7_0_ecx, leaf7_0_edx, leaf7_1_eax };

struct Rule {
  std::string_view feature;
  Leaf leaf;
  int bit;
  uint64_t state;
};

// Feature bits (Intel SDM volume 2A, CPUID; the same on AMD).
constexpr Rule kRules[] = {
    {"fma", Leaf::leaf1_ecx, 12, kYmm},         {"f16c", Leaf::leaf1_ecx, 29, kYmm},
    {"avx2", Leaf::leaf7_0_ebx, 5, kYmm},       {"avx512f", Leaf::leaf7_0_ebx, 16, kZmm},
    {"avx512dq", Leaf::leaf7_0_ebx, 17, kZmm},  {"avx512bw", Leaf::leaf7_0_ebx, 30, kZmm},
    {"avx512vl", Leaf::leaf7_0_ebx, 31, kZmm},  {"avx512vnni", Leaf::leaf7_0_ecx, 11, kZmm},
    {"amxbf16", Leaf::leaf7_0_edx, 22, kTile},  {"amxtile", Leaf::leaf7_0_edx, 24, kTile},
    {"amxint8", Leaf::leaf7_0_edx, 25, kTile},  {"avxvnni", Leaf::leaf7_1_eax, 4, kYmm},
    {"avx512bf16", Leaf::leaf7_1_eax, 5, kZmm},
};

uint32_t register_of(const CpuidFacts& facts, Leaf leaf) {
  switch (leaf) {
    case Leaf::leaf1_ecx:
      return facts.leaf1.ecx;
    case Leaf::leaf7_0_ebx:
      return facts.leaf7_0.ebx;
    case Leaf::leaf7_0_ecx:
      return facts.leaf7_0.ecx;
    case Leaf::leaf7_0_edx:
      return facts.leaf7_0.edx;
    case Leaf::leaf7_1_eax:
      return facts.leaf7_1.eax;
  }
  return 0;
}

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidRegisters r;
  __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
  return r;
}

uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Tile registers are 8 KB a thread, so Linux hands them out on request only (5.16 and later).
bool request_tile_permission() {
#ifdef SYS_arch_prctl
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

CpuidFacts read_cpuid() {
  CpuidFacts facts;
  facts.leaf0 = cpuid(0, 0);
  const uint32_t leaves = facts.leaf0.eax;
  facts.leaf1 = cpuid(1, 0);
  if (leaves >= 7) {
    facts.leaf7_0 = cpuid(7, 0);
    if (facts.leaf7_0.eax >= 1) facts.leaf7_1 = cpuid(7, 1);
  }
  const bool osxsave = (facts.leaf1.ecx >> 27 & 1) != 0;
  if (osxsave) facts.xcr0 = read_xcr0();
  const bool has_tiles = (facts.leaf7_0.edx >> 24 & 1) != 0;
  if (has_tiles && (facts.xcr0 & kTile) == kTile) facts.tile_permission = request_tile_permission();
  return facts;
}

bool has_feature(const CpuidFacts& facts, std::string_view feature) {
  for (const Rule& rule : kRules) {
    if (rule.feature != feature) continue;
    if ((register_of(facts, rule.leaf) >> rule.bit & 1) == 0) return false;
    if ((facts.xcr0 & rule.state) != rule.state) return false;
    return rule.state != kTile || facts.tile_permission;
  }
  return false;
}

// The vendors' names, four letters a register.
bool slow_bf16_dot(const CpuidFacts& facts) {
  // "GenuineIntel"
  return facts.leaf0.ebx == 0x756e6547 && facts.leaf0.edx == 0x49656e69 && facts.leaf0.ecx == 0x6c65746e;
}

bool two_shuffle_ports(const CpuidFacts& facts) {
  // "AuthenticAMD"
  return facts.leaf0.ebx == 0x68747541 && facts.leaf0.edx == 0x69746e65 && facts.leaf0.ecx == 0x444d4163;
}

std::string missing_features(const CpuidFacts& facts, std::string_view features) {
  std::string missing;
  while (!features.empty()) {
    const size_t space = features.find(' ');
    const std::string_view word = features.substr(0, space);
    features = space == std::string_view::npos ? std::string_view() : features.substr(space + 1);
    if (word.empty() || has_feature(facts, word)) continue;
    if (!missing.empty()) missing += ' ';
    missing += word;
  }
  return missing;
}

}  // namespace encast
