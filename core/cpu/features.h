#pragma once
#include <cstdint>
#include <string>
#include <string_view>

// What CPUID says, apart from how it is asked, so that tests can decode processors they do not run on.
namespace encast {

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

struct CpuidFacts {
  CpuidRegisters leaf0;          // the vendor
  CpuidRegisters leaf1;          // feature information
  CpuidRegisters leaf7_0;        // extended features, subleaf 0
  CpuidRegisters leaf7_1;        // extended features, subleaf 1
  uint64_t xcr0 = 0;             // register state that the operating system saves; 0 without OSXSAVE
  bool tile_permission = false;  // the kernel lets this process use the AMX tile registers
};

// Asks this processor and, where it has AMX, the kernel.
CpuidFacts read_cpuid();

// True when the feature (a word of cpu/isa.inc) is there and its registers are saved at a context switch.
// A word that no rule decodes is absent.
bool has_feature(const CpuidFacts& facts, std::string_view feature);

// Whether vdpbf16ps does fewer products a second than fma on the same bf16 values, widened. Of the processors
// that have it, those of Intel issue it every other cycle: measured on two generations (87 and 175 Gop/s a
// core on the one that core/kernels/gemm/README.md has figures of), and reported for Emerald Rapids
// (github.com/libxsmm/tpp-mlir/pull/1025). AMD's do not.
bool slow_bf16_dot(const CpuidFacts& facts);

// Whether shuffles of 512 bits have two ports. AMD's with AVX-512 have (measured on a Zen 5), Intel's have
// one.
bool two_shuffle_ports(const CpuidFacts& facts);

// The words of a space separated list that are absent, space separated.
std::string missing_features(const CpuidFacts& facts, std::string_view features);

}  // namespace encast
