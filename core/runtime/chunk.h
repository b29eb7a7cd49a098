#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/partition.h"
#include "runtime/plan.h"

namespace encast {

// A value's place while a chunk runs.
struct Place {
  std::byte* data = nullptr;
  int64_t stride = 0;       // elements
  float* scale = nullptr;   // q8 only
  int32_t* zero = nullptr;  // q8 only
};

// What a forward works on: whole sequences, at most chunk_tokens tokens together. Everything here is
// allocated when the executor is made and reused by every chunk.
struct Chunk {
  int64_t rows[kRowKinds] = {};             // of tokens, seqs, selected
  const int32_t* token_ids = nullptr;       // [tokens]
  const int32_t* token_type_ids = nullptr;  // [tokens]; zeros when the caller gave none
  std::vector<int32_t> positions;           // [tokens], of the embed step
  std::vector<int32_t> cu_seqlens;          // [seqs + 1], from 0
  std::vector<int32_t> first_rows;          // [seqs]
  std::vector<int32_t> seen;                // [seqs], of attention that hides keys
  std::vector<int32_t> selected_rows;       // [selected], from the chunk's first token
  std::vector<int32_t> attention_order;     // [seqs], longest first
  std::vector<Range> head_groups;           // of sequences, see head_tasks.h
  int64_t head_groups_used = 0;
  std::unique_ptr<std::atomic<int64_t>[]> next_task;  // of every stage: work is handed out piece by piece

  int64_t count(Rows kind) const { return rows[static_cast<size_t>(kind)]; }
};

}  // namespace encast
