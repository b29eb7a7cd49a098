#pragma once
#include <memory>

#include "runtime/binding.h"
#include "runtime/head_tasks.h"

namespace encast {

// Attention and the product that makes its rows, in tasks of some heads of some sequences: see head_tasks.h.
// Written for all tokens first, the rows of BERT-base take 9 MB for every 1,024 tokens, which go to a cache
// that cores share and come back from it.
class HeadStage {
 public:
  // For the attention at step `index` of the plan and the product before it; null where heads do not fill
  // panels or another step reads the rows.
  static std::unique_ptr<HeadStage> bind(const Plan& plan, size_t index, const std::byte* weights);

  // Tasks of a chunk, or 0 where they would be too few for the threads or a sequence is too long: then the
  // product goes over all rows first.
  int64_t tasks(const Chunk& chunk, int threads) const;

  // The rows of a task.
  Range rows(const Chunk& chunk, int64_t task) const;

  // The two halves of a task: queries, keys and values into the share's scratch, and from there the context.
  // While the last weights are multiplied, those of task `next` are prefetched, which the thread will
  // probably take after this one, or where there is none the next product's.
  void project(const Share& share, int64_t task, int64_t next) const;
  void attend(const Share& share, int64_t task) const;

 private:
  HeadStage(const Plan& plan, size_t index, const std::byte* weights);

  int64_t tasks_a_group() const { return attention_.heads / heads_; }
  Range seqs(const Chunk& chunk, int64_t task) const;
  float* task_rows(const Share& share) const;

  const StepDecl product_, attention_;
  const Binder binder_;
  const int after_;                 // the weights of the next product
  const int64_t most_rows_;         // of a task
  const int64_t head_dim_, heads_;  // heads: of a task
  const int64_t width_;             // columns of a task's queries, and of its keys and values
  Selection<GemmFn> multiply_;
  Selection<AttentionFn> attend_;
};

// Bytes that a thread needs for the attention at step `index`, and for the rows of a task where it is in one
// stage with its product.
int64_t attention_stage_scratch_bytes(const Plan& plan, size_t index);

}  // namespace encast
