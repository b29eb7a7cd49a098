#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
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

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Checks the XXH64 of tensors on `threads` threads of its own, while the caller does something else.
class Verification {
 public:
  // Throws ArtifactError for a tensor that lies outside of the file.
  Verification(std::shared_ptr<const Weights> weights, std::vector<TensorRange> tensors, int threads);
  ~Verification();  // as close
  Verification(const Verification&) = delete;
  Verification& operator=(const Verification&) = delete;

  // Helps until all is checked; throws ArtifactError naming a tensor that differs. Of one thread.
  void wait();
  // Leaves out the tensors that no thread has begun with, and waits for the others.
  void close();

 private:
  void work();
  void join();

  const std::shared_ptr<const Weights> weights_;
  std::vector<TensorRange> tensors_;  // the largest first
  std::atomic<size_t> next_{0}, next_slice_{0};
  std::atomic<const TensorRange*> damaged_{nullptr};
  // In a child of fork the threads do not exist, and are neither joined nor destroyed.
  const pid_t pid_;
  std::unique_ptr<std::vector<std::thread>> threads_;
};

}  // namespace encast
