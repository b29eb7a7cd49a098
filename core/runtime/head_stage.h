#pragma once
#include <memory>

#include "kernels/sparse/sparse.h"
#include "runtime/binding.h"
#include "runtime/head_tasks.h"

namespace encast {

// Attention and the product that makes its rows, in tasks of some heads of some sequences: see head_tasks.h.
// Written for all tokens first, the rows of BERT-base take 9 MB for every 1,024 tokens, which go to a cache
// that cores share and come back from it.
class HeadStage {
 public:
  HeadStage(const Plan& plan, const StageDecl& stage, const std::byte* weights);

  // Tasks of a chunk, or 0 where they would be too few for the threads or a sequence is too long: then the
  // product goes over all rows first.
  int64_t tasks(const Chunk& chunk, int threads) const;

  // The rows of a task.
  Range rows(const Chunk& chunk, int64_t task) const;

  // The two halves of a task: queries, keys and values into the share's scratch, and from there the context.
  // While the last weights are multiplied, those of task `next` are prefetched, which the thread will
  // probably take after this one, or where there is none the next product's.
  // `last`: the task that the share's thread took before this one, or -1.
  void project(const Share& share, int64_t task, int64_t next, int64_t last) const;
  void attend(const Share& share, int64_t task) const;

 private:
  int64_t tasks_a_group() const { return attention_.heads / heads_; }
  void project_dense(const Share& share, Range rows, int64_t task, int64_t next) const;
  void project_sparse(const Share& share, Range rows, int64_t task, int64_t last) const;
  Range seqs(const Chunk& chunk, int64_t task) const;
  float* task_rows(const Share& share) const;

  const StepDecl product_, dense_, attention_;  // dense_: the product, or its form in panels
  const Binder binder_;
  const int after_;                 // the weights of the next product
  const int64_t most_rows_;         // of a task
  const int64_t task_bytes_;        // of scratch, before what a sparse product needs
  const int64_t head_dim_, heads_;  // heads: of a task
  const int64_t width_;             // columns of a task's queries, and of its keys and values
  std::unique_ptr<const Selection<GemmFn>> multiply_;  // null without panels
  std::unique_ptr<const Selection<SparseFn>> skip_;    // null where the product is not sparse
  Selection<AttentionFn> attend_;
};

// Bytes that a thread needs for the attention of a stage, and for the rows of a task of heads.
int64_t stage_scratch_bytes(const Plan& plan, const StageDecl& stage);

}  // namespace encast
