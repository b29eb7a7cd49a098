#include "runtime/executor.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "base/error.h"
#include "kernels/sparse/sparse.h"

namespace encast {
namespace {

std::byte* map_arena(size_t bytes) {
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw ResourceError("no memory for an arena of " + std::to_string(bytes) +
                        " bytes; lower ENCAST_CHUNK_TOKENS or the number of instances");
  }
  // Activations are reread many times: fewer TLB misses. Best effort, as kernels may forbid it.
  madvise(data, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(data);
}

// MXCSR as the ABI sets it up, which kernels count on (simd/vec.h), on this thread while it lives. The caller
// may have come with subnormals flushed or another rounding, and workers inherit what their creator had:
// without this bits would depend on the thread that a row falls to.
class PlainFloatMode {
 public:
  PlainFloatMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainFloatMode() { _mm_setcsr(before_); }
  PlainFloatMode(const PlainFloatMode&) = delete;
  PlainFloatMode& operator=(const PlainFloatMode&) = delete;

 private:
  const unsigned before_;
};

// Where a value lies in memory for `capacity` rows, of which the first is `first_row`.
Place place_of(const ValueDecl& value, std::byte* memory, int64_t capacity, int64_t first_row) {
  Place place;
  place.stride = value.stride();
  place.data = memory - first_row * place.stride * static_cast<int64_t>(element_bytes(value.dtype));
  if (value.dtype == DType::q8) {
    std::byte* aux = memory + capacity * place.stride;
    place.scale = reinterpret_cast<float*>(aux) - first_row;
    place.zero = reinterpret_cast<int32_t*>(aux + round_up(capacity * 4, 64)) - first_row;
  }
  return place;
}

// Likewise for a value in the memory of a block.
Place place_in_block(const ValueDecl& value, std::byte* memory, int64_t capacity, int64_t first_row) {
  return place_of(value, memory + value.offset * (capacity / ValueDecl::kBlockUnit), capacity, first_row);
}

// Bytes that a thread needs beside values while it runs a stage.
int64_t scratch_bytes(const Plan& plan, const StageDecl& stage) {
  int64_t bytes = stage_scratch_bytes(plan, stage);
  for (size_t index = stage.begin; index < stage.end; ++index) {
    const StepDecl& step = plan.steps[index];
    if (step.kind != StepKind::sparse) continue;
    bytes = std::max(bytes, sparse_scratch_bytes(plan.values[static_cast<size_t>(step.x)].cols));
  }
  return bytes;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Executor::Unmap::operator()(std::byte* data) const { munmap(data, bytes); }

Executor::Executor(Plan plan, std::shared_ptr<const Weights> weights, TeamOptions team)
    : plan_(std::move(plan)), weights_(std::move(weights)), team_(std::move(team)) {
  plan_.check_weights(weights_->bytes());
  for (size_t index = 0; index < plan_.steps.size(); ++index) {
    steps_.push_back(bind_step(plan_, index, weights_->data()));
    if (plan_.steps[index].kind == StepKind::embed) embed_ = &plan_.steps[index];
    if (plan_.steps[index].unseen >= 0) hides_ = &plan_.steps[index];
  }
  int64_t scratch = 0;
  for (const StageDecl& stage : plan_.stages) {
    const bool heads = stage.kind == StageKind::heads;
    heads_.push_back(heads ? std::make_unique<HeadStage>(plan_, stage, weights_->data()) : nullptr);
    scratch = std::max(scratch, round_up(scratch_bytes(plan_, stage), 64));
  }
  chunk_.next_task = std::make_unique<std::atomic<int64_t>[]>(steps_.size());
  for (const OutputDecl& output : plan_.outputs) stages_.push_back(needed_stages(output.value));

  const int64_t block = plan_.block_bytes();
  const int64_t arena = round_up(plan_.arena, 64);
  arena_bytes_ = arena + (block + scratch) * team_.size() + 64;
  arena_ = {map_arena(static_cast<size_t>(arena_bytes_)), Unmap{static_cast<size_t>(arena_bytes_)}};
  block_memory_ = arena_.get() + arena;
  for (int thread = 0; thread < team_.size(); ++thread) {
    scratch_.push_back(block_memory_ + block * team_.size() + scratch * thread);
  }
  const int64_t capacity = plan_.chunk_tokens;
  for (const ValueDecl& value : plan_.values) {
    if (value.offset == ValueDecl::kCallerMemory) {
      common_.push_back({.stride = value.cols});
    } else if (value.in_block) {
      common_.push_back(place_in_block(value, block_memory_, plan_.block_capacity() * team_.size(), 0));
    } else {
      common_.push_back(place_of(value, arena_.get() + value.offset, capacity, 0));
    }
  }
  own_.assign(static_cast<size_t>(team_.size()), common_);
  const auto size = static_cast<size_t>(capacity);
  no_types_.assign(size, 0);
  chunk_.positions.resize(size);
  chunk_.cu_seqlens.resize(size + 1);
  chunk_.first_rows.resize(size);
  chunk_.seen.resize(hides_ == nullptr ? 0 : size);
  chunk_.selected_rows.resize(size);
  chunk_.attention_order.resize(size);
  chunk_.head_groups.resize(plan_.head_tokens > 0 ? size : 0);
}

std::vector<Executor::Stage> Executor::needed_stages(int value) const {
  const std::vector<bool> needed = plan_.needed_steps(value);
  std::vector<Stage> stages;
  for (size_t number = 0; number < plan_.stages.size(); ++number) {
    const StageDecl& decl = plan_.stages[number];
    Stage stage{.mixes_rows = decl.kind != StageKind::rows, .heads = heads_[number].get()};
    for (size_t index = decl.begin; index < decl.end; ++index) {
      if (!needed[index]) continue;
      const StepDecl& step = plan_.steps[index];
      stage.rows = plan_.values[static_cast<size_t>(step.out)].rows;
      stage.steps.push_back(static_cast<uint32_t>(index));
      stage.has_product = stage.has_product || step.kind == StepKind::linear || step.kind == StepKind::sparse;
      stage.tiles = stage.tiles || steps_[index]->tiles();
      stage.rows_together = std::max(stage.rows_together, steps_[index]->rows_together());
      for (int id : {step.out, step.also}) {
        if (id >= 0 && plan_.values[static_cast<size_t>(id)].in_block) {
          stage.block_values.push_back(static_cast<uint32_t>(id));
        }
      }
    }
    if (!stage.steps.empty()) stages.push_back(std::move(stage));
  }
  return stages;
}

size_t Executor::find_output(std::string_view output) const {
  for (size_t index = 0; index < plan_.outputs.size(); ++index) {
    if (plan_.outputs[index].name == output) return index;
  }
  std::string known;
  for (const OutputDecl& one : plan_.outputs) known += (known.empty() ? "" : ", ") + one.name;
  throw InputError("this artifact has no output '" + std::string(output) + "'; it has: " + known);
}

Executor::Shape Executor::output_shape(std::string_view output, const Request& request) const {
  const ValueDecl& value = plan_.values[static_cast<size_t>(plan_.outputs[find_output(output)].value)];
  const int64_t rows[kRowKinds] = {request.tokens, request.seqs, request.selected};
  return {rows[static_cast<size_t>(value.rows)], value.cols};
}

void Executor::check(const OutputDecl& output, const Request& request) const {
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (request.seqs < 0 || request.cu_seqlens[0] != 0 || request.cu_seqlens[request.seqs] != request.tokens) {
    throw InputError("cu_seqlens must rise from 0 to the number of tokens, " + text(request.tokens));
  }
  for (int64_t seq = 0; seq < request.seqs; ++seq) {
    const int64_t length = int64_t{request.cu_seqlens[seq + 1]} - request.cu_seqlens[seq];
    if (length < 1 || length > plan_.max_len) {
      throw InputError("sequence " + text(seq) + " has " + text(length) + " tokens; this model takes 1 to " +
                       text(plan_.max_len));
    }
  }
  const auto in_range = [&](const int32_t* ids, int64_t limit, const char* what) {
    for (int64_t token = 0; token < request.tokens; ++token) {
      if (ids[token] < 0 || ids[token] >= limit) {
        throw InputError(std::string(what) + " " + text(ids[token]) + " at token " + text(token) +
                         " is out of range; this model has " + text(limit));
      }
    }
  };
  in_range(request.token_ids, plan_.vocab, "token id");
  // A model without token types accepts zeros, as tokenizers give them.
  if (request.token_type_ids != nullptr) {
    in_range(request.token_type_ids, std::max<int64_t>(plan_.types, 1), "token type id");
  }
  if (plan_.values[static_cast<size_t>(output.value)].rows != Rows::selected) return;
  for (int64_t index = 0; index < request.selected; ++index) {
    const int64_t row = request.select[index];
    if (row >= request.tokens || row <= (index == 0 ? -1 : request.select[index - 1])) {
      throw InputError("select[" + text(index) + "] is " + text(row) + "; rows must rise and lie below " +
                       text(request.tokens));
    }
  }
}

// Positions as the embed step counts them, see position_ids in the op table.
void Executor::fill_positions() {
  for (int64_t seq = 0; seq < chunk_.count(Rows::seqs); ++seq) {
    int32_t next = embed_->offset;
    for (int32_t row = chunk_.cu_seqlens[static_cast<size_t>(seq)];
         row < chunk_.cu_seqlens[static_cast<size_t>(seq) + 1]; ++row) {
      const bool skipped = embed_->skip >= 0 && chunk_.token_ids[row] == embed_->skip;
      chunk_.positions[static_cast<size_t>(row)] = skipped ? embed_->offset - 1 : next++;
    }
  }
}

// As op seen_tokens counts them.
void Executor::fill_seen() {
  for (int64_t seq = 0; seq < chunk_.count(Rows::seqs); ++seq) {
    const int32_t first = chunk_.cu_seqlens[static_cast<size_t>(seq)];
    const int32_t end = chunk_.cu_seqlens[static_cast<size_t>(seq) + 1];
    const int32_t least = std::max(end - first - hides_->most_unseen, 1);
    int32_t seen = end - first;
    while (seen > least && chunk_.token_ids[first + seen - 1] == hides_->unseen) --seen;
    chunk_.seen[static_cast<size_t>(seq)] = seen;
  }
}

// Fills the chunk with whole sequences from first_seq on; returns the sequence after the last.
int64_t Executor::prepare(const Request& request, int64_t first_seq, int64_t& first_selected) {
  const int32_t start = request.cu_seqlens[first_seq];
  int64_t seq = first_seq;
  while (seq < request.seqs && request.cu_seqlens[seq + 1] - start <= plan_.chunk_tokens) {
    const auto local = static_cast<size_t>(seq - first_seq);
    chunk_.cu_seqlens[local] = chunk_.first_rows[local] = request.cu_seqlens[seq] - start;
    ++seq;
  }
  const int64_t seqs = seq - first_seq;
  const int32_t end = request.cu_seqlens[seq];
  chunk_.cu_seqlens[static_cast<size_t>(seqs)] = end - start;
  chunk_.token_ids = request.token_ids + start;
  chunk_.token_type_ids =
      request.token_type_ids == nullptr ? no_types_.data() : request.token_type_ids + start;
  int64_t selected = 0;
  while (first_selected + selected < request.selected && request.select[first_selected + selected] < end) {
    chunk_.selected_rows[static_cast<size_t>(selected)] = request.select[first_selected + selected] - start;
    ++selected;
  }
  first_selected += selected;
  chunk_.rows[static_cast<size_t>(Rows::tokens)] = end - start;
  chunk_.rows[static_cast<size_t>(Rows::seqs)] = seqs;
  chunk_.rows[static_cast<size_t>(Rows::selected)] = selected;
  for (size_t step = 0; step < steps_.size(); ++step)
    chunk_.next_task[step].store(0, std::memory_order_relaxed);
  if (embed_ != nullptr && embed_->position >= 0) fill_positions();
  if (hides_ != nullptr) fill_seen();
  if (plan_.head_tokens > 0) {
    const std::span<const int32_t> cu_seqlens(chunk_.cu_seqlens.data(), static_cast<size_t>(seqs) + 1);
    chunk_.head_groups_used = group_sequences(cu_seqlens, plan_.head_tokens, chunk_.head_groups);
  }
  if (team_.size() > 1) {
    const auto order = chunk_.attention_order.begin();
    const auto length = [&](int32_t at) {
      return chunk_.cu_seqlens[static_cast<size_t>(at) + 1] - chunk_.cu_seqlens[static_cast<size_t>(at)];
    };
    std::iota(order, order + seqs, 0);
    std::sort(order, order + seqs,
              [&](int32_t a, int32_t b) { return length(a) != length(b) ? length(a) > length(b) : a < b; });
  } else {
    std::iota(chunk_.attention_order.begin(), chunk_.attention_order.begin() + seqs, 0);
  }
  return seq;
}

template <class Body>
void Executor::traced(uint32_t step, const Share& share, int thread, bool heads,
                      std::vector<TraceEvent>* events, Body body) const {
  if (events == nullptr) {
    body();
    return;
  }
  const int64_t begin = now_ns();
  body();
  const int64_t end = now_ns();
  const Range dense = SparseRows(plan_.steps[step], share.rows, share.parts).dense;
  events->push_back({begin, end, thread, static_cast<int32_t>(step), share.rows.begin,
                     share.rows.end - share.rows.begin, chunk_number_, dense.end - dense.begin, heads});
}

void Executor::run_step(uint32_t step, const Share& share, int thread,
                        std::vector<TraceEvent>* events) const {
  traced(step, share, thread, false, events, [&] { steps_[step]->run(share); });
}

bool Executor::run_heads(const Stage& stage, int thread, std::vector<TraceEvent>* events) {
  const int threads = team_.size();
  const int64_t tasks = stage.heads == nullptr ? 0 : stage.heads->tasks(chunk_, threads);
  if (tasks == 0) return false;
  std::atomic<int64_t>& next = chunk_.next_task[stage.steps.front()];
  for (int64_t task, last = -1; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks; last = task) {
    const Share share = {
        chunk_, common_.data(), scratch_[static_cast<size_t>(thread)], stage.heads->rows(chunk_, task),
        thread, threads};
    traced(stage.steps.front(), share, thread, true, events,
           [&] { stage.heads->project(share, task, task + threads, last); });
    traced(stage.steps.back(), share, thread, true, events, [&] { stage.heads->attend(share, task); });
    let_pass(thread);
  }
  return true;
}

void Executor::run_stage(const Stage& stage, int thread, std::vector<TraceEvent>* events) {
  let_pass(thread);  // others of its team may take all that there is to do in the stage
  const int threads = team_.size();
  const int64_t rows = chunk_.count(stage.rows);
  std::byte* scratch = scratch_[static_cast<size_t>(thread)];
  const bool together = stage.mixes_rows || (stage.has_product && rows < plan_.stream_rows * threads);
  if (run_heads(stage, thread, events)) return;
  if (together && (threads > 1 || stage.mixes_rows)) {
    const Share share = {chunk_, common_.data(), scratch, {0, rows}, thread, threads};
    for (const uint32_t step : stage.steps) {
      run_step(step, share, thread, events);
      let_pass(thread);
      if (step != stage.steps.back()) team_.barrier();
    }
    return;
  }
  if (stage.rows_together > 1) {
    run_blocks(stage, TileBlocks(rows, std::min(plan_.block_rows, stage.rows_together), threads), thread,
               events);
  } else {
    run_blocks(stage, Blocks(rows, plan_.block_rows, threads, stage.tiles), thread, events);
  }
}

template <class Blocks>
void Executor::run_blocks(const Stage& stage, const Blocks& blocks, int thread,
                          std::vector<TraceEvent>* events) {
  Places& places = own_[static_cast<size_t>(thread)];
  std::byte* memory = block_memory_ + plan_.block_bytes() * thread;
  std::atomic<int64_t>& next = chunk_.next_task[stage.steps.front()];
  for (int64_t block; (block = next.fetch_add(1, std::memory_order_relaxed)) < blocks.count;) {
    const Range range = blocks.at(block);
    for (const uint32_t id : stage.block_values) {
      places[id] = place_in_block(plan_.values[id], memory, plan_.block_capacity(), range.begin);
    }
    const Share share = {chunk_, places.data(), scratch_[static_cast<size_t>(thread)], range};
    for (const uint32_t step : stage.steps) run_step(step, share, thread, events);
    let_pass(thread);
  }
}

void Executor::run(std::string_view output, const Request& request, float* out, Trace* trace,
                   const Pause* pause) {
  const size_t which = find_output(output);
  const OutputDecl& decl = plan_.outputs[which];
  check(decl, request);
  const std::lock_guard<std::mutex> lock(mutex_);
  pause_ = pause;
  const auto id = static_cast<size_t>(decl.value);
  const ValueDecl& value = plan_.values[id];
  const Place arena_place = common_[id];
  const auto put = [&](const Place& place) {
    common_[id] = place;
    for (Places& places : own_) places[id] = place;
  };
  const std::vector<Stage>& stages = stages_[which];
  Request rest = request;
  if (value.rows != Rows::selected) rest.selected = 0;
  if (trace != nullptr) {
    trace->threads.assign(static_cast<size_t>(team_.size()), {});
    trace->begin_ns = now_ns();
  }

  chunk_number_ = 0;
  int64_t selected = 0;
  int64_t written = 0;
  for (int64_t seq = 0; seq < request.seqs; ++chunk_number_) {
    seq = prepare(rest, seq, selected);
    if (value.rows == Rows::selected && chunk_.count(Rows::selected) == 0) continue;
    // Steps that make the output write straight into the caller's rows.
    put({.data = reinterpret_cast<std::byte*>(out + written * value.cols), .stride = value.cols});
    auto share = [&](int thread) {
      const PlainFloatMode plain;
      auto* events = trace == nullptr ? nullptr : &trace->threads[static_cast<size_t>(thread)];
      for (const Stage& stage : stages) {
        run_stage(stage, thread, events);
        if (&stage != &stages.back()) team_.barrier();
      }
    };
    team_.run(share);
    written += chunk_.count(value.rows);
  }
  put(arena_place);
  pause_ = nullptr;
  if (trace != nullptr) trace->end_ns = now_ns();
}

std::vector<std::vector<std::string>> Executor::kernels() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& step : steps_) names.push_back(step->kernels());
  return names;
}

}  // namespace encast
