#include "cpu/bandwidth.h"

#include <cstddef>

#include "testing/check.h"
#include "testing/guard.h"

namespace encast::testing {
namespace {

ENCAST_TEST(every_byte_lies_inside_of_the_buffer) {
  // Between pages that nobody may touch: a load beyond either end faults; a prefetch does not.
  for (const int64_t bytes : {kReadBlock, 3 * kReadBlock, 64 * kReadBlock}) {
    const GuardedBuffer<std::byte> buffer(static_cast<size_t>(bytes));
    for (const bool prefetch : {false, true}) read_probe(prefetch).run(buffer.data(), bytes, 2);
  }
}

ENCAST_TEST(the_widest_allowed_loads_are_taken) {
  const Isa best = isa_allowed(Isa::avx512) ? Isa::avx512 : isa_allowed(Isa::avx2) ? Isa::avx2 : Isa::scalar;
  for (const bool prefetch : {false, true}) {
    CHECK(read_probe(prefetch).isa == best);
    CHECK(read_probe(prefetch).prefetch == prefetch);
  }
}

}  // namespace
}  // namespace encast::testing

ENCAST_TEST_MAIN
