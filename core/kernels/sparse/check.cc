#include "kernels/sparse/check.h"

namespace encast {
namespace {

constexpr int64_t kAhead = 16;  // blocks

// Whether `count` columns rise, to one below k. Without a branch in the loop: opening a
// file reads all of them.
bool rises(const uint16_t* columns, int64_t count, int64_t k) {
  bool falls = false;
  for (int64_t i = 1; i < count; ++i) falls |= columns[i] <= columns[i - 1];
  return !falls && (count == 0 || columns[count - 1] < k);
}

// Of a block's groups: the first column that is out of range or order, or repeated without need.
std::string problem_of_block(const SparseWeight& w, int64_t block, int64_t k) {
  const int64_t begin = int64_t{w.starts[block]} * kGroupInputs,
                end = int64_t{w.starts[block + 1]} * kGroupInputs;
  const auto at = [&](int64_t place) {
    return "block " + std::to_string(block) + ", column " + std::to_string(place - begin) + ": ";
  };
  // The last group may repeat columns. What is wrong before it is told below.
  const int64_t last = begin < end ? end - kGroupInputs : begin;
  for (int64_t place = rises(w.columns + begin, last - begin, k) ? last : begin; place < end; ++place) {
    const int64_t column = w.columns[place];
    if (column >= k) {
      return at(place) + "is " + std::to_string(column) + ", there are " + std::to_string(k) + " inputs";
    }
    if (place == begin || column > w.columns[place - 1]) continue;
    // Only to fill the last group, and with nothing.
    const bool fills = column == w.columns[place - 1] && place / kGroupInputs == end / kGroupInputs - 1 &&
                       place % kGroupInputs != 0;
    if (!fills) return at(place) + "columns do not rise";
    const int8_t* const group = w.values + place / kGroupInputs * kBlockOutputs * kGroupInputs;
    for (int64_t output = 0; output < kBlockOutputs; ++output) {
      if (group[output * kGroupInputs + place % kGroupInputs] != 0) {
        return at(place) + "repeats the column before it with another weight";
      }
    }
  }
  return "";
}

}  // namespace

std::string sparse_problem(const SparseWeight& w, int64_t groups, int64_t n, int64_t k) {
  const int64_t blocks = sparse_blocks(n);
  if (k > kMostSparseInputs) return "has more than " + std::to_string(kMostSparseInputs) + " inputs";
  // Nothing is stored that is empty: a weight of zeros alone has a group that belongs to no block.
  const bool zeros = groups == 1 && w.starts[blocks] == 0;
  if (w.starts[0] != 0 || (w.starts[blocks] != groups && !zeros)) {
    return "its blocks do not begin at 0 and end with the groups";
  }
  // All of them first: a start that is out of range would lead out of the columns.
  for (int64_t block = 0; block < blocks; ++block) {
    if (w.starts[block] > w.starts[block + 1])
      return "block " + std::to_string(block) + " ends before it begins";
  }
  for (int64_t block = 0; block < blocks; ++block) {
    // Of values only the last group of a block is read, which no cache has.
    const int64_t ahead = w.starts[block + kAhead < blocks ? block + kAhead : blocks];
    if (ahead > 0) __builtin_prefetch(w.values + (ahead - 1) * kBlockOutputs * kGroupInputs);
    if (std::string problem = problem_of_block(w, block, k); !problem.empty()) return problem;
  }
  return "";
}

}  // namespace encast
