#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "cpu/bandwidth.h"
#include "cpu/peak.h"
#include "timing/ceilings.h"
#include "timing/gemm.h"

namespace nb = nanobind;

namespace encast {
namespace {

using Pairs = std::vector<std::pair<double, double>>;

// One thread a CPU. The team spins all the while, since a sleeper would measure the kernel.
TeamOptions team_on(std::vector<int> cpus) {
  constexpr size_t kMaxThreads = 4096;
  if (cpus.empty() || cpus.size() > kMaxThreads)
    throw InputError(std::to_string(cpus.size()) + " CPUs are given; 1 to " + std::to_string(kMaxThreads) +
                     " are accepted, one for each thread");
  constexpr int kSpinMicroseconds = 1'000'000;
  const int threads = static_cast<int>(cpus.size());
  return {threads, std::move(cpus), kSpinMicroseconds};
}

Pairs pairs_of(const std::vector<Round>& rounds) {
  Pairs pairs;
  for (const Round& round : rounds) pairs.emplace_back(round.rate, round.running);
  return pairs;
}

Isa isa_named(std::string_view name) {
  std::string known;
  for (const IsaInfo& level : isa_levels()) {
    if (name == level.name) return level.isa;
    known += (known.empty() ? "" : ", ") + std::string(level.name);
  }
  throw InputError("\"" + std::string(name) + "\" is no ISA level; there are " + known);
}

std::vector<std::pair<std::string, std::string>> list_peak_probes() {
  std::vector<std::pair<std::string, std::string>> probes;
  for (const PeakProbe& probe : peak_probes())
    if (isa_allowed(probe.isa)) probes.emplace_back(probe.dtype, isa_name(probe.isa));
  return probes;
}

const KernelInfo& kernel_of(const GemmTimer& timer, std::string_view name) {
  std::string known;
  for (const KernelInfo* kernel : timer.kernels()) {
    if (name == kernel->name) return *kernel;
    known += (known.empty() ? "" : ", ") + std::string(kernel->name);
  }
  throw InputError("\"" + std::string(name) + "\" does not compute this product here; there are " + known);
}

std::vector<std::string> names_of_kernels(const GemmTimer& timer) {
  std::vector<std::string> names;
  for (const KernelInfo* kernel : timer.kernels()) names.emplace_back(kernel->name);
  return names;
}

}  // namespace

void bind_timing(nb::module_& m) {
  using namespace nb::literals;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  m.attr("READ_BLOCK_BYTES") = kReadBlock;
  m.def("peak_probes", &list_peak_probes,
        "(dtype, ISA level) of every product instruction that may run here and can be measured.");
  m.def(
      "measure_ops",
      [](std::string_view dtype, std::string_view isa, std::vector<int> cpus, int rounds, double seconds) {
        return pairs_of(measure_ops(dtype, isa_named(isa), team_on(std::move(cpus)), rounds, seconds));
      },
      "dtype"_a, "isa"_a, "cpus"_a, "rounds"_a, "seconds"_a, Release(),
      "(operations a second of all threads, smallest part of the round that a thread had a processor for) "
      "of\n"
      "every round of `seconds`, a thread on each of `cpus`. Raises InputError, ResourceError.");
  m.def(
      "measure_reads",
      [](int64_t bytes, bool prefetch, std::vector<int> cpus, int rounds, double seconds) {
        return pairs_of(measure_reads(bytes, prefetch, team_on(std::move(cpus)), rounds, seconds));
      },
      "bytes"_a, "prefetch"_a, "cpus"_a, "rounds"_a, "seconds"_a, Release(),
      "Likewise in bytes a second; each thread reads `bytes` of its own, a multiple of READ_BLOCK_BYTES.");
  m.def(
      "measure_barriers",
      [](std::vector<int> cpus, int rounds) { return measure_barriers(team_on(std::move(cpus)), rounds); },
      "cpus"_a, "rounds"_a, Release(), "Nanoseconds of a barrier of the busy team, a value a round.");
  nb::class_<GemmTimer>(m, "GemmTimer",
                        "Times the gemm kernels on a[m, k] @ w[n, k] of \"f32\", \"bf16\" or \"int8\", a\n"
                        "thread on each of `cpus`, with copies of the weights of `weight_bytes` together.\n"
                        "Raises InputError, ResourceError.")
      .def(
          "__init__",
          [](GemmTimer* self, std::string_view dtype, int64_t m, int64_t n, int64_t k, int64_t weight_bytes,
             std::vector<int> cpus) {
            new (self) GemmTimer(dtype, m, n, k, weight_bytes, team_on(std::move(cpus)));
          },
          "dtype"_a, "m"_a, "n"_a, "k"_a, "weight_bytes"_a, "cpus"_a, Release())
      .def("kernels", &names_of_kernels, "Names of the kernels that may run here.")
      .def_prop_ro("weight_bytes", &GemmTimer::weight_bytes, "Bytes of weights that one call reads.")
      .def(
          "check",
          [](GemmTimer& self, std::string_view kernel) { return self.check(kernel_of(self, kernel)); },
          "kernel"_a, Release(), "Whether the kernel's answer is within its bound of the reference.")
      .def(
          "run",
          [](GemmTimer& self, std::string_view kernel, int64_t calls) {
            if (calls < 1) throw InputError("calls is " + std::to_string(calls) + "; 1 or more are accepted");
            return self.run(kernel_of(self, kernel), calls);
          },
          "kernel"_a, "calls"_a, Release(),
          "Seconds of a call, the mean of `calls`: processor time of one thread, wall time of several.");
}

}  // namespace encast
