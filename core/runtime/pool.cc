#include "runtime/pool.h"

#include <unistd.h>

#include "base/error.h"

namespace encast {

ExecutorPool::ExecutorPool(std::vector<std::unique_ptr<Executor>> executors)
    : executors_(std::move(executors)), pid_(getpid()) {
  if (executors_.empty()) throw InputError("a pool without executors runs nothing; give it at least one");
  // Lent from the back: the first executor first.
  for (size_t index = executors_.size(); index-- > 0;) free_.push_back(executors_[index].get());
}

ExecutorPool::~ExecutorPool() {
  if (getpid() != pid_) static_cast<void>(monitor_.release());
}

ExecutorPool::Lease ExecutorPool::lease_within(std::chrono::milliseconds wait) {
  std::unique_lock<std::mutex> lock(monitor_->mutex);
  const bool ready = monitor_->changed.wait_for(lock, wait, [&] { return closed_ || !free_.empty(); });
  if (closed_) throw ResourceError("the engine is closed; load the artifact again");
  if (!ready) return {};
  Executor* executor = free_.back();
  free_.pop_back();
  return {this, executor};
}

void ExecutorPool::give_back(Executor* executor) {
  const std::lock_guard<std::mutex> lock(monitor_->mutex);
  free_.push_back(executor);
  // Once closed, those who wait are not only callers, who take one executor each, but also who closes.
  if (closed_) {
    monitor_->changed.notify_all();
  } else {
    monitor_->changed.notify_one();
  }
}

void ExecutorPool::close() {
  std::vector<std::unique_ptr<Executor>> freed;
  std::unique_lock<std::mutex> lock(monitor_->mutex);
  if (closed_) return;
  closed_ = true;
  monitor_->changed.notify_all();
  monitor_->changed.wait(lock, [&] { return free_.size() == executors_.size(); });
  free_.clear();
  freed.swap(executors_);
  // The lock is gone before the threads of the executors end.
}

}  // namespace encast
