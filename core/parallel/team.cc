#include "parallel/team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <string>
#include <system_error>

#include "base/error.h"

namespace encast {
namespace {

using Clock = std::chrono::steady_clock;

uint32_t* futex_word(const std::atomic<uint32_t>& word) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return reinterpret_cast<uint32_t*>(const_cast<std::atomic<uint32_t>*>(&word));
}

cpu_set_t set_of(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

// Keeps the caller off the workers' CPUs while a run lasts: there it would only wait for itself.
class CallerPlace {
 public:
  explicit CallerPlace(const std::vector<int>& cpus) {
    if (cpus.size() < 2) return;
    const int here = sched_getcpu();
    if (std::find(cpus.begin() + 1, cpus.end(), here) == cpus.end()) return;
    if (pthread_getaffinity_np(pthread_self(), sizeof(before_), &before_) != 0) return;
    const cpu_set_t place = set_of(cpus[0]);
    moved_ = pthread_setaffinity_np(pthread_self(), sizeof(place), &place) == 0;
  }
  ~CallerPlace() {
    if (moved_) pthread_setaffinity_np(pthread_self(), sizeof(before_), &before_);
  }
  CallerPlace(const CallerPlace&) = delete;
  CallerPlace& operator=(const CallerPlace&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace

Team::Team(TeamOptions options) : options_(std::move(options)), size_(options_.threads), pid_(getpid()) {
  if (size_ < 1) throw ResourceError("a team needs at least one thread, not " + std::to_string(size_));
  if (!options_.cpus.empty() && static_cast<int>(options_.cpus.size()) != size_) {
    throw ResourceError(std::to_string(options_.cpus.size()) + " CPUs given for " + std::to_string(size_) +
                        " threads; give one CPU a thread, or none");
  }
  for (int cpu : options_.cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw ResourceError("CPU " + std::to_string(cpu) + " does not exist");
  }
  std::string failure;
  for (int thread = 1; thread < size_ && failure.empty(); ++thread) {
    try {
      workers_->emplace_back(&Team::work, this, thread);
    } catch (const std::system_error& error) {
      failure = "thread " + std::to_string(thread) + " of " + std::to_string(size_) +
                " could not be started: " + error.what() + "; ask for fewer threads";
      break;
    }
    if (!options_.cpus.empty()) {
      const int cpu = options_.cpus[static_cast<size_t>(thread)];
      const cpu_set_t place = set_of(cpu);
      if (pthread_setaffinity_np(workers_->back().native_handle(), sizeof(place), &place) != 0) {
        failure = "a thread could not be pinned to CPU " + std::to_string(cpu) +
                  "; it is offline or outside of this process's affinity mask";
      }
    }
  }
  if (!failure.empty()) {
    // Workers that did start still count themselves against size_: let them go without a barrier.
    stop_ = true;
    advance(epoch_);
    for (std::thread& worker : *workers_) worker.join();
    throw ResourceError(failure);
  }
}

Team::~Team() {
  if (getpid() != pid_) {
    // The threads stayed in the parent: here their handles name nothing that could be joined or detached, and
    // a std::thread must not be destroyed with one.
    static_cast<void>(workers_.release());
    return;
  }
  stop_ = true;
  advance(epoch_);
  for (std::thread& worker : *workers_) worker.join();
}

void Team::start(Job job, void* data) {
  if (size_ == 1) {
    job(data, 0);
    return;
  }
  const CallerPlace place(options_.cpus);
  job_ = job;
  data_ = data;
  advance(epoch_);
  job(data, 0);
  barrier();
}

void Team::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_while(epoch_, seen, options_.idle_spin_us);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    job_(data_, thread);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    advance(generation_);
  } else {
    wait_while(generation_, generation, options_.spin_us);
  }
}

void Team::advance(std::atomic<uint32_t>& word) {
  // Sequentially consistent with the sleeper's increment and its check in the kernel: either the sleeper is
  // counted here and woken, or it finds the new value and does not sleep.
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    syscall(SYS_futex, futex_word(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

void Team::wait_while(const std::atomic<uint32_t>& word, uint32_t old, int spin_us) {
  // The clock costs about as much as a hand-over, so it is read once in many rounds.
  constexpr int kRounds = 64;
  const auto deadline = Clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int round = 0; round < kRounds; ++round) {
      if (word.load(std::memory_order_acquire) != old) return;
      _mm_pause();
    }
  } while (Clock::now() < deadline);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == old) {
    syscall(SYS_futex, futex_word(word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace encast
