#pragma once
#include <string>

#include "kernels/sparse/sparse.h"

namespace encast {

// What is wrong with a weight of `groups` groups for n outputs and k inputs, of which nothing but the sizes
// of its arrays is known; empty when nothing is. Kernels rely on it, and on a file that nobody writes into
// later.
std::string sparse_problem(const SparseWeight& w, int64_t groups, int64_t n, int64_t k);

}  // namespace encast
