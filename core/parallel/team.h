#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace encast {

struct TeamOptions {
  int threads = 1;         // the caller included
  std::vector<int> cpus;   // CPU of every thread, or empty: no pinning
  int spin_us = 1000;      // how long a thread that waits for others within a run spins before it sleeps
  int idle_spin_us = 200;  // and a worker that waits for the next run
};

// A fixed team of threads for one caller at a time. The caller is thread 0.
//
// Threads wait by spinning for a bounded time and then sleep in the kernel, so a hot team hands work over in
// well under a microsecond and an idle one costs nothing. Workers are pinned for good; the caller is not ours
// to pin, so it is moved for the length of a run, and only if it stands on a worker's CPU.
class Team {
 public:
  // Throws ResourceError when a thread cannot be started or pinned. A forked child has none of the threads:
  // there a team can only be destroyed.
  explicit Team(TeamOptions options);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs f(thread) on every thread and returns when all are done. f must not throw.
  template <class F>
  void run(F& f) {
    start([](void* data, int thread) { (*static_cast<F*>(data))(thread); }, &f);
  }

  // Inside run: returns once every thread has arrived.
  void barrier();

 private:
  using Job = void (*)(void*, int);
  void start(Job job, void* data);
  void work(int thread);
  void wait_while(const std::atomic<uint32_t>& word, uint32_t old, int spin_us);
  void advance(std::atomic<uint32_t>& word);

  TeamOptions options_;
  int size_;
  Job job_ = nullptr;
  void* data_ = nullptr;
  bool stop_ = false;
  int pid_;                                          // of the process whose threads these are
  alignas(64) std::atomic<uint32_t> epoch_{0};       // one more for every run
  alignas(64) std::atomic<uint32_t> generation_{0};  // one more for every barrier passed
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  // By pointer, so that a forked child can leave the handles where they are.
  std::unique_ptr<std::vector<std::thread>> workers_ = std::make_unique<std::vector<std::thread>>();
};

}  // namespace encast
