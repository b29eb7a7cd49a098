#pragma once
#include <cstddef>
#include <cstdint>

namespace encast {

// XXH64 of a buffer, as the xxHash specification (version 0.1.1) defines it: the checksum of stored tensors.
// It finds damage; it does not withstand an adversary.
uint64_t xxh64(const void* data, size_t bytes, uint64_t seed = 0);

}  // namespace encast
