#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/team.h"
#include "runtime/chunk.h"
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

// One instance: a plan, an arena and a team of threads over shared weights.
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
  void run(std::string_view output, const Request& request, float* out);

  // Kernel names, a list for every step of the plan.
  std::vector<std::vector<std::string>> kernels() const;
  const Plan& plan() const { return plan_; }
  int64_t arena_bytes() const { return arena_bytes_; }

 private:
  size_t find_output(std::string_view output) const;
  void check(const OutputDecl& output, const Request& request) const;
  int64_t prepare(const Request& request, int64_t first_seq, int64_t& first_selected);
  void fill_positions();

  struct Unmap {
    size_t bytes;
    void operator()(std::byte* data) const;
  };

  const Plan plan_;
  const std::shared_ptr<const Weights> weights_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::vector<std::vector<uint32_t>> needed_;  // steps of every output, in order
  const StepDecl* embed_ = nullptr;
  int64_t arena_bytes_ = 0;
  std::unique_ptr<std::byte, Unmap> arena_;
  std::vector<int32_t> no_types_;
  Chunk chunk_;
  Team team_;
  std::mutex mutex_;
};

}  // namespace encast
