#pragma once
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/executor.h"

namespace encast {

// Executors for callers on any number of threads, each of which has one to itself for as long as its lease
// lives.
class ExecutorPool {
 public:
  // Throws InputError when there is no executor.
  explicit ExecutorPool(std::vector<std::unique_ptr<Executor>> executors);
  // Waits for nobody: leases have ended, except in a forked child, where those of the parent's threads never
  // do.
  ~ExecutorPool();
  ExecutorPool(const ExecutorPool&) = delete;
  ExecutorPool& operator=(const ExecutorPool&) = delete;

  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept : pool_(other.pool_), executor_(std::exchange(other.executor_, nullptr)) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (executor_ != nullptr) pool_->give_back(executor_);
    }
    explicit operator bool() const { return executor_ != nullptr; }
    Executor* operator->() const { return executor_; }

   private:
    friend class ExecutorPool;
    Lease(ExecutorPool* pool, Executor* executor) : pool_(pool), executor_(executor) {}

    ExecutorPool* pool_ = nullptr;
    Executor* executor_ = nullptr;
  };

  // Of the free executors the one used last, whose threads may still be awake. Waits so long for one, and
  // gives an empty lease if there was none. Throws ResourceError once the pool is closed.
  Lease lease_within(std::chrono::milliseconds wait);

  // Refuses new leases, waits for all that there are to end, and frees the executors. A second call does
  // nothing.
  void close();

 private:
  struct Monitor {
    std::mutex mutex;
    std::condition_variable changed;
  };

  void give_back(Executor* executor);

  // The monitor guards what follows. By pointer, since destroying a condition variable waits for its waiters:
  // a forked child leaves it where it is.
  std::unique_ptr<Monitor> monitor_ = std::make_unique<Monitor>();
  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<Executor*> free_;
  bool closed_ = false;
  const int pid_;
};

}  // namespace encast
