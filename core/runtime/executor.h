#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/team.h"
#include "runtime/chunk.h"
#include "runtime/head_stage.h"
#include "runtime/plan.h"
#include "runtime/step.h"
#include "runtime/weights.h"

namespace encast {

// A packed batch, see ARCHITECTURE.md.
struct Request {
  const int32_t* token_ids = nullptr;  // [tokens]
  int64_t tokens = 0;
  const int32_t* cu_seqlens = nullptr;  // [seqs + 1]
  int64_t seqs = 0;
  const int32_t* token_type_ids = nullptr;  // [tokens] or null: zeros
  const int32_t* select = nullptr;          // [selected], rising; rows for outputs with selected rows
  int64_t selected = 0;
};

// What a thread did when, in nanoseconds of the steady clock. A stage's steps come once for every block of
// rows, those of a head stage once for every task, whose rows are those of other heads' tasks too.
struct TraceEvent {
  int64_t begin_ns, end_ns;
  int32_t thread, step;
  int64_t first_row, rows;  // of the chunk
  int32_t chunk;
  int64_t dense_rows;  // those of a sparse product that its dense form multiplied
  bool heads;          // whether it was a task of heads: a stage of heads also runs over all rows, see
                       // HeadStage::tasks
};

// The events of one run, thread by thread.
struct Trace {
  int64_t begin_ns = 0, end_ns = 0;
  std::vector<std::vector<TraceEvent>> threads;
};

// Stops a run between two blocks of rows for other work on its thread: once after each time that `asked`
// became true, which any thread may set.
struct Pause {
  std::atomic<bool>& asked;
  void (*go)(void*);  // must not throw, nor run the same executor
  void* data;
};

// One instance: a plan, an arena and a team of threads over shared weights.
//
// A chunk passes through the plan stage by stage (plan.h), with a barrier after each. With many rows a thread
// takes one block of rows after another through all steps of the stage, alone: their values stay in its
// caches, and nobody waits. With few, all threads do each step together, products by panels, so that each
// weight is read by one core only, and meet after each step. Attention and the product before it go through
// tasks of some heads of some sequences, see HeadStage.
class Executor {
 public:
  // Throws PlanError, ResourceError.
  Executor(Plan plan, std::shared_ptr<const Weights> weights, TeamOptions team);

  // Rows and columns of an output for a request; throws InputError for an unknown output.
  struct Shape {
    int64_t rows, cols;
  };
  Shape output_shape(std::string_view output, const Request& request) const;

  // Runs what the output needs, a chunk of whole sequences at a time, and writes f32[rows, cols] to out.
  // Allocates nothing. One run at a time; a second caller waits. Throws InputError before any work when ids,
  // token types, lengths or selected rows are out of range.
  // With a trace, every thread notes what it does; that allocates. Of a team thread 0, the caller, stops for
  // `pause`; the others go on until they need it.
  void run(std::string_view output, const Request& request, float* out, Trace* trace = nullptr,
           const Pause* pause = nullptr);

  // Kernel names, a list for every step of the plan.
  std::vector<std::vector<std::string>> kernels() const;
  const Plan& plan() const { return plan_; }
  int64_t arena_bytes() const { return arena_bytes_; }

 private:
  // The steps of a stage that an output needs.
  struct Stage {
    std::vector<uint32_t> steps;
    std::vector<uint32_t> block_values;  // values in the memory of a block
    Rows rows = Rows::tokens;
    bool mixes_rows = false;           // attention hands its work out itself
    const HeadStage* heads = nullptr;  // of a stage of heads
    bool has_product = false;
    bool tiles = false;         // products work in tiles of AMX
    int64_t rows_together = 1;  // the most of its steps
  };
  using Places = std::vector<Place>;

  std::vector<Stage> needed_stages(int value) const;
  void run_stage(const Stage& stage, int thread, std::vector<TraceEvent>* events);
  template <class Blocks>
  void run_blocks(const Stage& stage, const Blocks& blocks, int thread, std::vector<TraceEvent>* events);
  // False where the stage's steps have to go one after the other.
  bool run_heads(const Stage& stage, int thread, std::vector<TraceEvent>* events);
  template <class Body>
  void traced(uint32_t step, const Share& share, int thread, bool heads, std::vector<TraceEvent>* events,
              Body body) const;
  void run_step(uint32_t step, const Share& share, int thread, std::vector<TraceEvent>* events) const;
  void let_pass(int thread) const {
    if (thread == 0 && pause_ != nullptr && pause_->asked.load(std::memory_order_relaxed) &&
        pause_->asked.exchange(false)) {
      pause_->go(pause_->data);
    }
  }
  size_t find_output(std::string_view output) const;
  void check(const OutputDecl& output, const Request& request) const;
  int64_t prepare(const Request& request, int64_t first_seq, int64_t& first_selected);
  void fill_positions();
  void fill_seen();

  struct Unmap {
    size_t bytes;
    void operator()(std::byte* data) const;
  };

  const Plan plan_;
  const std::shared_ptr<const Weights> weights_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<std::unique_ptr<HeadStage>> heads_;  // of every stage; null for most
  std::vector<std::vector<Stage>> stages_;         // that every output needs
  const StepDecl* embed_ = nullptr;
  const StepDecl* hides_ = nullptr;  // an attention that hides keys; all of the plan hide the same
  int64_t arena_bytes_ = 0;
  std::unique_ptr<std::byte, Unmap> arena_;
  std::byte* block_memory_ = nullptr;  // of all threads, one after the other
  std::vector<std::byte*> scratch_;    // of every thread
  Places common_;                      // values as they lie when all threads work on one step
  std::vector<Places> own_;            // and as each thread sees them while it works on a block
  std::vector<int32_t> no_types_;
  int32_t chunk_number_ = 0;
  const Pause* pause_ = nullptr;  // of the run
  Chunk chunk_;
  Team team_;
  std::mutex mutex_;
};

}  // namespace encast
