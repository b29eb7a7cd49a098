#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

#include "kernels/gemm/gemm.h"
#include "parallel/partition.h"

// A projection and the attention over its rows cut into tasks: some heads of some whole sequences each, whose
// queries, keys and values are made, read and forgotten in a core's own cache. A function of sizes alone;
// bits do not depend on it.
namespace encast {

// A task takes as many heads as fill whole panels of the projection.
constexpr int64_t heads_of_panels(int64_t head_dim) { return kPanel / std::gcd(kPanel, head_dim); }

// Whether all heads can be cut so, with queries, keys and values of every task in panels of their own.
constexpr bool heads_fill_panels(int64_t heads, int64_t head_dim) {
  return heads % heads_of_panels(head_dim) == 0;
}

// Neighbouring sequences of at most `most` tokens together, or one that is longer: cuts [0, seqs) into
// groups, those with most tokens first. The last ones are half as large, so that less is left to wait for.
// Returns how many there are; at most one for each sequence.
inline int64_t group_sequences(std::span<const int32_t> cu_seqlens, int64_t most, std::span<Range> groups) {
  const auto tokens = [&](Range seqs) {
    return cu_seqlens[static_cast<size_t>(seqs.end)] - cu_seqlens[static_cast<size_t>(seqs.begin)];
  };
  const auto seqs = static_cast<int64_t>(cu_seqlens.size()) - 1;
  size_t count = 0;
  for (int64_t begin = 0, end; begin < seqs; begin = end) {
    const int64_t room = tokens({begin, seqs}) <= 2 * most ? most / 2 : most;
    end = begin + 1;
    while (end < seqs && tokens({begin, end + 1}) <= room) ++end;
    groups[count++] = {begin, end};
  }
  std::sort(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(count), [&](Range a, Range b) {
    return tokens(a) != tokens(b) ? tokens(a) > tokens(b) : a.begin < b.begin;
  });
  return static_cast<int64_t>(count);
}

// Whether so many tasks of about the same size keep all threads busy to the end.
constexpr bool tasks_suffice(int64_t tasks, int threads) {
  return tasks >= 4 * threads || tasks % threads == 0;
}

}  // namespace encast
