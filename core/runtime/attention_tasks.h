#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "parallel/partition.h"

// Attention cut into tasks: a head of a sequence each, and where those would be too few or too unlike for the
// threads, blocks of its queries. A function of sizes alone; bits do not depend on it.
namespace encast {

struct AttentionTask {
  int64_t seq, head;
  Range queries;
};

// Work is taken as the square of the length. No task should be more than its share of all work when every
// thread does kTasksAThread of them; but each packs all keys and values of its sequence anew, which
// kLeastQueries pay for.
class AttentionTasks {
 public:
  // `order` lists the sequences, longest first where there is more than one thread.
  AttentionTasks(std::span<const int32_t> cu_seqlens, std::span<const int32_t> order, int64_t heads,
                 int threads)
      : cu_seqlens_(cu_seqlens), order_(order), heads_(heads), threads_(threads) {
    for (const int32_t seq : order) work_ += length(seq) * length(seq);
    work_ *= heads;
    for (const int32_t seq : order) {
      if (pieces(seq) == 1) break;
      split_tasks_ += heads * pieces(seq);
      ++split_seqs_;
    }
  }

  int64_t count() const { return split_tasks_ + (seqs() - split_seqs_) * heads_; }

  // Tasks of the longest sequences come first.
  AttentionTask at(int64_t index) const {
    if (index >= split_tasks_) {
      const int64_t rest = index - split_tasks_;
      const int32_t seq = order_[static_cast<size_t>(split_seqs_ + rest / heads_)];
      return {seq, rest % heads_, {0, length(seq)}};
    }
    for (const int32_t seq : order_) {
      const int64_t parts = pieces(seq);
      if (index < heads_ * parts) {
        const Range all = {0, length(seq)};
        return {seq, index / parts,
                split(all, kRowGrain, static_cast<int>(index % parts), static_cast<int>(parts))};
      }
      index -= heads_ * parts;
    }
    return {0, 0, {0, 0}};
  }

 private:
  static constexpr int64_t kTasksAThread = 2, kLeastQueries = 96;

  int64_t seqs() const { return static_cast<int64_t>(order_.size()); }
  int64_t length(int32_t seq) const {
    return cu_seqlens_[static_cast<size_t>(seq) + 1] - cu_seqlens_[static_cast<size_t>(seq)];
  }
  // 1 for one thread, and never more for a shorter sequence.
  int64_t pieces(int32_t seq) const {
    const int64_t len = length(seq), most = std::max(len / kLeastQueries, int64_t{1});
    if (threads_ == 1 || work_ == 0) return 1;
    return std::clamp((kTasksAThread * threads_ * len * len + work_ - 1) / work_, int64_t{1}, most);
  }

  std::span<const int32_t> cu_seqlens_, order_;
  int64_t heads_, work_ = 0, split_tasks_ = 0, split_seqs_ = 0;
  int threads_;
};

}  // namespace encast
