#pragma once
#include <memory>
#include <string>
#include <vector>

#include "parallel/partition.h"
#include "runtime/chunk.h"
#include "runtime/plan.h"

namespace encast {

// What one thread computes of a step: its part of `rows`, which are of the kind that the step makes. Taking a
// block of rows through several steps, a thread is alone with it (parts = 1) and sees values of the block's
// memory where it has them; see Executor.
struct Share {
  Chunk& chunk;
  const Place* places;  // of every value
  std::byte* scratch;
  Range rows;
  int part = 0, parts = 1;
};

// A step of the plan, bound to its weights and to the kernels that this machine runs it with.
class Step {
 public:
  virtual ~Step() = default;
  // No two parts write the same rows and columns.
  virtual void run(const Share& share) const = 0;
  // Names of the kernels that it may call, for one row and upwards.
  const std::vector<std::string>& kernels() const { return kernels_; }
  // Whether it is a product that may work in tiles of AMX.
  bool tiles() const { return tiles_; }
  // Rows that its kernels had best get at a time; else 1.
  int64_t rows_together() const { return rows_together_; }

 protected:
  std::vector<std::string> kernels_;
  bool tiles_ = false;
  int64_t rows_together_ = 1;
};

// Binds step `index` of the plan; throws ResourceError when no kernel of its arithmetic may run here.
// `weights` is the start of the mapped file, checked against the plan before.
std::unique_ptr<Step> bind_step(const Plan& plan, size_t index, const std::byte* weights);

}  // namespace encast
