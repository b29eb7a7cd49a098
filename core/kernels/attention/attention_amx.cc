#include "kernels/attention/bf16_codes.h"
#include "kernels/attention/narrow_impl.h"
#include "simd/amx_instructions.h"

namespace encast {

void attention_bf16_6x64_avx512bf16(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                                    int64_t query_end, void* scratch);

namespace {

struct AmxProducts : TileProducts, Bf16Codes {
  using Tiles = AmxInstructions;
};

// Shorter ones are done before the unit of tiles is awake.
constexpr int64_t kLeastTokens = 24;

}  // namespace

// Class bf16_tile: tdpbf16ps, and for texts of fewer than kLeastTokens what bf16_dp is.
void attention_bf16_48x16_amx(const AttentionArgs& args, int64_t seq, int64_t head, int64_t query_begin,
                              int64_t query_end, void* scratch) {
  if (args.cu_seqlens[seq + 1] - args.cu_seqlens[seq] < kLeastTokens) {
    attention_bf16_6x64_avx512bf16(args, seq, head, query_begin, query_end, scratch);
  } else {
    avx512::narrow_attention<AmxProducts>(args, seq, head, query_begin, query_end, scratch);
  }
}

}  // namespace encast
