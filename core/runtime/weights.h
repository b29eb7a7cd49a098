#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace encast {

struct TensorRange {
  std::string name;
  uint64_t offset = 0, bytes = 0;  // in the file
  uint64_t xxh64 = 0;
};

// The weights file, mapped read-only and shared: processes that open it use the same memory. Or a copy of it,
// in huge pages where the kernel gives them, near the thread that opens it, and of this process alone.
class Weights {
 public:
  // Throws ArtifactError when the file cannot be opened, mapped or read, ResourceError when there is no
  // memory for a copy.
  explicit Weights(const std::string& path, bool copy = false);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  const std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

  // Checks the XXH64 of the ranges with `threads` threads; throws ArtifactError naming one that differs.
  void verify(const std::vector<TensorRange>& tensors, int threads) const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace encast
