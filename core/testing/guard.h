#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>

// Buffers that fault on the first byte read or written outside of them.
namespace encast::testing {

// `n` elements of T whose end touches a page without access; another such page lies below.
//
//   | no access | slack ........ [ n elements ][ offset elements ] | no access |
//
// With offset > 0 the buffer ends `offset` elements before the page, which moves its alignment; then
// check_slack() tells whether anything outside was written. Memory starts as the byte 0xa5 throughout:
// 0xa5a5a5a5 is a tiny negative float, so values read by mistake do not look like zero.
// Alignment: a buffer's start is aligned only as its end and its size make it. Contracts that promise
// 64-byte alignment need a size that is a multiple of 64 bytes.
template <class T>
class GuardedBuffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit GuardedBuffer(size_t n, size_t offset = 0) : n_(n), offset_(offset) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = (n + offset) * sizeof(T);
    inner_bytes_ = (bytes + page - 1) / page * page + page;
    map_bytes_ = inner_bytes_ + 2 * page;
    void* map = mmap(nullptr, map_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) throw std::bad_alloc();
    map_ = static_cast<uint8_t*>(map);
    inner_ = map_ + page;
    if (mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    std::memset(inner_, kFill, inner_bytes_);
    data_ = reinterpret_cast<T*>(inner_ + inner_bytes_ - bytes);
  }
  ~GuardedBuffer() {
    if (map_ != nullptr) munmap(map_, map_bytes_);
  }
  GuardedBuffer(GuardedBuffer&& other) noexcept
      : map_(other.map_),
        inner_(other.inner_),
        data_(other.data_),
        n_(other.n_),
        offset_(other.offset_),
        inner_bytes_(other.inner_bytes_),
        map_bytes_(other.map_bytes_) {
    other.map_ = nullptr;
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return n_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + n_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + n_; }
  std::span<T> span() { return {data_, n_}; }
  std::span<const T> span() const { return {data_, n_}; }

  // Makes further writes fault: for operands that a kernel must only read.
  void make_read_only() { mprotect(inner_, inner_bytes_, PROT_READ); }

  // True when the slack before the elements and the offset after them still hold their first bytes.
  bool check_slack() const {
    const uint8_t* begin = reinterpret_cast<const uint8_t*>(data_);
    const uint8_t* end = reinterpret_cast<const uint8_t*>(data_ + n_);
    for (const uint8_t* p = inner_; p < begin; ++p)
      if (*p != kFill) return false;
    for (const uint8_t* p = end; p < inner_ + inner_bytes_; ++p)
      if (*p != kFill) return false;
    return true;
  }

 private:
  static constexpr uint8_t kFill = 0xa5;
  uint8_t* map_ = nullptr;
  uint8_t* inner_ = nullptr;
  T* data_ = nullptr;
  size_t n_, offset_, inner_bytes_ = 0, map_bytes_ = 0;
};

}  // namespace encast::testing
