#pragma once
#include "kernels/rows.h"

// Contract: op embed_rows, arithmetic f32: out = word[id] (+ token_type[type]) (+ position[pos]), added in
// this order, then layer norm when gamma is given. Ids are in range: the runtime has checked them.
namespace encast {

struct EmbedArgs {
  int64_t cols = 0;
  const int32_t* token_ids = nullptr;       // [tokens]
  const int32_t* token_type_ids = nullptr;  // [tokens], with token_type
  const int32_t* positions = nullptr;       // [tokens], with position
  const float* word = nullptr;              // [vocab, cols], dense
  const float* position = nullptr;          // or null
  const float* token_type = nullptr;        // or null
  const float* gamma = nullptr;             // or null: no layer norm
  const float* beta = nullptr;
  float eps = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  NarrowOut narrow;
};

using EmbedFn = void (*)(const EmbedArgs& args, int64_t row_begin, int64_t row_end);

}  // namespace encast
