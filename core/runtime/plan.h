#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "kernels/gemm/gemm.h"
#include "kernels/reduce/reduce.h"

// The plan: what one machine runs, as text that people review and this loader validates.
//
//   encast-plan 1
//   limits vocab=30522 types=2 max_len=512 chunk_tokens=1024 arena=8650752 block_rows=48 stream_rows=48
//          head_tokens=128 block=36864 exact=0   (one line)
//   weight w0 f32 dense 30522 384 @4096          rows cols, at a byte offset of the weights file
//   weight w1 s8 panels 1152 384 @46886912       n k, packed in panels of 64 columns
//   weight w2 f32 padded 1 1152 @...             a vector padded to a multiple of 64
//   value v0 f32 tokens 384 @0                   rows cols, at a byte offset of the arena; @-: outside of it;
//   value v1 q8 tokens 384 @+6144                @+: in the memory of a block of rows, see Stages
//   stage rows                                   of the steps that follow, up to the next one
//   step embed name=embeddings word=w0 ... out=v0 also=v1
//   output last_hidden_state v9
//
// Ids count up from 0 in the order of declaration. The keys of every kind of step stand in its file in
// steps/.
//
// Stages say how threads share steps. Lowering cuts them; here they are checked.
//
//   stage rows        Steps that make rows of one kind, each row from the same row of what the stage makes: a
//                     thread may take a block of rows through all of them while their values stay in its
//                     caches.
//   stage sequences   One attention, which mixes the rows of a sequence.
//   stage heads       Attention and the product that makes its rows, and nobody else reads those: a thread
//                     may take some heads of sequences of head_tokens tokens through both.
//
// Values that live within one stage of rows may lie in the block's memory, where offsets are given for every
// 16 rows of the block. Values of the arena keep their memory for whole stages; only a value of the same type
// may take the place of one that its stage of rows has read for the last time.
namespace encast {

enum class Rows : uint8_t { tokens, seqs, selected };
constexpr int kRowKinds = 3;

enum class WeightLayout : uint8_t { dense, panels, padded };

struct WeightDecl {
  DType dtype = DType::f32;
  WeightLayout layout = WeightLayout::dense;
  int64_t rows = 0, cols = 0;
  uint64_t offset = 0;

  uint64_t bytes() const;
};

struct ValueDecl {
  static constexpr int64_t kCallerMemory = -1;
  static constexpr int64_t kBlockUnit = 16;  // rows for which offsets in a block's memory are given
  DType dtype = DType::f32;
  Rows rows = Rows::tokens;
  int64_t cols = 0;
  int64_t offset = kCallerMemory;
  bool in_block = false;  // offset is one of the block's memory, not of the arena

  // Elements from one row to the next in the arena: rows are 64-byte aligned, and narrow ones hold the
  // 64-column padding that their kernels fill (kernels/rows.h).
  int64_t stride() const { return round_up(cols, dtype == DType::f32 ? 16 : 64); }
  // Bytes for `capacity` rows; a q8 value ends in its scales and zero points. Linear in multiples of
  // kBlockUnit rows.
  int64_t bytes(int64_t capacity) const {
    const int64_t aux = dtype == DType::q8 ? 2 * round_up(capacity * 4, 64) : 0;
    return capacity * stride() * static_cast<int64_t>(element_bytes(dtype)) + aux;
  }
  // Bytes that are read or written of `columns` of a row: without padding, with a q8 row's scale and zero
  // point.
  int64_t row_bytes(int64_t columns) const {
    return columns * static_cast<int64_t>(element_bytes(dtype)) + (dtype == DType::q8 ? 8 : 0);
  }
};

enum class StepKind : uint8_t {
#define ENCAST_STEP(kind) kind,
#include "runtime/steps/steps.inc"
#undef ENCAST_STEP
};

// Operands are ids, -1 when absent.
// A step makes its out and also; one of rotary changes what it reads, and its out is its x.
struct StepDecl {
  StepKind kind = StepKind::embed;
  std::string name;        // of the module that it computes
  std::string arithmetic;  // class of a linear or an attention
  int x = -1, other = -1, out = -1, also = -1;
  int word = -1, position = -1, token_type = -1, gamma = -1, beta = -1, table = -1;
  int w = -1, columns = -1, starts = -1, scale = -1, colsum = -1, bias = -1;
  int dense = -1;          // of a sparse product: the same weight in panels
  int32_t dense_rows = 0;  // most rows of a thread for which it is multiplied by those
  int key_table = -1, query_table = -1;
  float eps = 0, factor = 1;
  int32_t heads = 0, reach = 0, offset = 0, skip = -1, column = 0;
  int32_t unseen = -1, most_unseen = 0;  // see op seen_tokens: its token, -1 without it, and its most
  bool zero_point = false;
  bool shared_tables = false;  // key_table and query_table are those of all heads
  float q8_scale = 0;          // of every row of a narrow output; 0: each row has its own
  int32_t q8_zero = 0;
  Activation act = Activation::none;
  bool coarse = false;  // the activation's coarse form, see simd/activation.h
  Pooling mode = Pooling::cls;
};

enum class StageKind : uint8_t { rows, sequences, heads };

struct StageDecl {
  StageKind kind = StageKind::rows;
  size_t begin = 0, end = 0;  // of the plan's steps
};

struct OutputDecl {
  std::string name;
  int value = -1;
};

struct Plan {
  int64_t vocab = 0, types = 0, max_len = 0, chunk_tokens = 0, arena = 0;
  int64_t block_rows = 0;   // most rows that a thread takes through a stage at a time
  int64_t stream_rows = 0;  // with fewer rows a thread, threads share a product's weights instead of its rows
  // Most tokens of the sequences that share a task of a stage of heads (a longer one goes alone); 0 without
  // such a stage.
  int64_t head_tokens = 0;
  int64_t block = 0;  // bytes of a block's memory for every kBlockUnit rows

  // Rows that a thread's block memory holds: its own block's, or its part of those that all threads share.
  int64_t block_capacity() const {
    return round_up(block_rows > stream_rows ? block_rows : stream_rows, ValueDecl::kBlockUnit);
  }
  int64_t block_bytes() const { return block * (block_capacity() / ValueDecl::kBlockUnit); }

  bool exact = false;
  std::vector<WeightDecl> weights;
  std::vector<ValueDecl> values;
  std::vector<StepDecl> steps;
  std::vector<StageDecl> stages;  // every step is in one
  std::vector<OutputDecl> outputs;

  // Parses and validates; throws PlanError naming the line, the step or the stage. Checked: every number's
  // range, every operand's existence, dtype and shape, that values are made before they are read, that stages
  // hold the steps that they may, that no step writes memory that a later step still reads, that the arena
  // holds every value.
  static Plan parse(std::string_view text);

  // Whether every step is needed for an output's value.
  std::vector<bool> needed_steps(int value) const;

  // Throws PlanError when a weight lies outside of a file of this size or is not 64-byte aligned.
  void check_weights(uint64_t file_bytes) const;
};

const char* step_name(StepKind kind);
const char* step_keys(StepKind kind);  // see StepType
std::optional<StepKind> step_kind(std::string_view name);
const char* rows_name(Rows rows);
const char* layout_name(WeightLayout layout);
const char* stage_name(StageKind kind);

}  // namespace encast
