#include "runtime/weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <utility>

#include "base/error.h"
#include "base/xxh64.h"

namespace encast {
namespace {

// The file's bytes in memory of this process's own, read-only.
std::byte* copy_of(const std::string& path, int file, uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw ResourceError(path + ": no memory for a copy of its " + std::to_string(bytes) +
                        " bytes; unset ENCAST_COPY_WEIGHTS to use the mapped file");
  }
  madvise(memory, bytes, MADV_HUGEPAGE);  // best effort: kernels may forbid it
  std::byte* const data = static_cast<std::byte*>(memory);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t count = pread(file, data + done, bytes - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      std::string problem = path + ": cannot be read: ";
      problem += count < 0 ? std::strerror(errno) : "it became shorter";
      munmap(memory, bytes);
      throw ArtifactError(problem);
    }
    done += static_cast<uint64_t>(count);
  }
  mprotect(memory, bytes, PROT_READ);
  return data;
}

// Of a file, in whole pages. Small: other threads of the process get no memory from the kernel meanwhile.
constexpr size_t kSlice = size_t{128} << 10;

// Maps a slice in one call; faults one by one would cost more than the hash. Best effort.
void populate([[maybe_unused]] const std::byte* slice, [[maybe_unused]] size_t bytes) {
#ifdef MADV_POPULATE_READ
  madvise(const_cast<std::byte*>(slice), bytes, MADV_POPULATE_READ);
#endif
}

}  // namespace

Weights::Weights(const std::string& path, bool copy) : path_(path) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) throw ArtifactError(path + ": cannot be opened: " + std::strerror(errno));
  struct Closer {
    int file;
    ~Closer() { close(file); }
  } const closer{file};
  struct stat facts;
  if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size <= 0) {
    throw ArtifactError(path + ": is not a regular file with content; compile the artifact again");
  }
  bytes_ = static_cast<uint64_t>(facts.st_size);
  if (copy) {
    data_ = copy_of(path, file, bytes_);
    return;
  }
  void* mapped = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) throw ArtifactError(path + ": cannot be mapped: " + std::strerror(errno));
  data_ = static_cast<const std::byte*>(mapped);
}

Weights::~Weights() { munmap(const_cast<std::byte*>(data_), bytes_); }

Verification::Verification(std::shared_ptr<const Weights> weights, std::vector<TensorRange> tensors,
                           int threads)
    : weights_(std::move(weights)),
      tensors_(std::move(tensors)),
      pid_(getpid()),
      threads_(std::make_unique<std::vector<std::thread>>()) {
  const uint64_t bytes = weights_->bytes();
  for (const TensorRange& tensor : tensors_) {
    if (tensor.offset > bytes || tensor.bytes > bytes - tensor.offset) {
      throw ArtifactError(weights_->path() + ": tensor " + tensor.name +
                          " lies outside of the file, which has " + std::to_string(bytes) +
                          " bytes; it was truncated: compile the artifact again");
    }
  }
  std::ranges::sort(tensors_, std::greater(), &TensorRange::bytes);
  try {
    for (int thread = 0; thread < threads; ++thread) threads_->emplace_back([this] { work(); });
  } catch (const std::exception&) {
    // Those at hand, and the one that waits, do all of it.
  }
}

Verification::~Verification() {
  if (getpid() == pid_) {
    close();
  } else {
    static_cast<void>(threads_.release());
  }
}

void Verification::close() {
  next_ = tensors_.size();
  next_slice_ = weights_->bytes() / kSlice + 1;
  join();
}

void Verification::work() {
  // All threads map what few of them will read: one tensor may be most of the file.
  for (size_t begin; (begin = kSlice * next_slice_.fetch_add(1)) < weights_->bytes();) {
    populate(weights_->data() + begin, std::min(kSlice, weights_->bytes() - begin));
  }
  for (size_t index; (index = next_.fetch_add(1)) < tensors_.size() && damaged_.load() == nullptr;) {
    const TensorRange& tensor = tensors_[index];
    if (xxh64(weights_->data() + tensor.offset, tensor.bytes, 0) != tensor.xxh64) damaged_.store(&tensor);
  }
}

void Verification::join() {
  for (std::thread& thread : *threads_) thread.join();
  threads_->clear();
}

void Verification::wait() {
  work();
  join();
  if (const TensorRange* tensor = damaged_.load()) {
    throw ArtifactError(weights_->path() + ": the checksum of tensor " + tensor->name + " (" +
                        std::to_string(tensor->bytes) + " bytes at offset " + std::to_string(tensor->offset) +
                        ") differs: the file is damaged; compile the artifact again");
  }
}

}  // namespace encast
