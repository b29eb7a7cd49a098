#include "cpu/peak.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "testing/check.h"

namespace encast {
namespace {

ENCAST_TEST(every_dtype_can_be_probed_on_every_machine) {
  for (const std::string dtype : {"f32", "bf16", "int8"}) {
    bool scalar = false;
    for (const PeakProbe& probe : peak_probes()) scalar |= probe.dtype == dtype && probe.isa == Isa::scalar;
    CHECK(scalar);
  }
}

ENCAST_TEST(every_allowed_probe_runs_here) {
  for (const PeakProbe& probe : peak_probes()) {
    CHECK(probe.ops > 0);
    if (isa_allowed(probe.isa)) probe.run(3);
  }
}

ENCAST_TEST(the_best_level_is_taken) {
  for (const PeakProbe& probe : peak_probes())
    if (isa_allowed(probe.isa) && probe.isa <= isa_best()) CHECK(peak_probe(probe.dtype).isa >= probe.isa);
  for (const char* dtype : {"f32", "bf16", "int8"}) CHECK(peak_probe(dtype).isa <= isa_best());
  CHECK(isa_allowed(peak_probe("int8").isa));
}

ENCAST_TEST(a_rate_comes_out) {
  for (const char* dtype : {"f32", "bf16", "int8"})
    for (const int threads : {1, 2}) {
      const double rate = peak_ops_per_second(dtype, threads, 0.005);
      CHECK(std::isfinite(rate) && rate > 0);
    }
}

ENCAST_TEST(rounds_that_lost_their_processor_do_not_count) {
  CHECK(best_rate({{100, 0.99}, {101, 0.98}, {430, 0.23}, {160, 0.62}}) == 101);
  CHECK(best_rate({{100, 0.5}, {101, 0.45}, {160, 0.3}}) == 101);
  CHECK(best_rate({{430, 0.23}}) == 430);  // there is no better one
  CHECK(best_rate({{0, 0}, {0, 0}}) == 0);
  CHECK(best_rate({}) == 0);
}

ENCAST_TEST(wrong_requests_are_refused) {
  CHECK_THROWS(peak_ops_per_second("f16", 1, 0.01), InputError, "f32, bf16 and int8");
  CHECK_THROWS(peak_ops_per_second("f32", 0, 0.01), InputError, "threads is 0");
  CHECK_THROWS(peak_ops_per_second("f32", 1, 0), InputError, "seconds");
  CHECK_THROWS(peak_ops_per_second("f32", 1, std::nan("")), InputError, "seconds");
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
