#pragma once
#include <cstddef>
#include <cstdint>

namespace encast {

// At least `bytes` of memory of the calling thread, aligned to 64 bytes: the same from call to call unless
// it has to grow, and freed with the thread. What the last user left in it is lost. Null where there is
// none to be had: who asks needs another way.
uint8_t* thread_scratch(size_t bytes) noexcept;

}  // namespace encast
