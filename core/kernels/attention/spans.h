#pragma once
#include "kernels/attention/attention.h"

// A call cut into spans: some keys, one after the other, and queries that see no others. A span is computed
// as if it were a sequence of its own, so that with a reach the cost of a query is that of its neighbourhood,
// however long the sequence is.
namespace encast {
namespace {

// Of the definition: LOCAL_QUERY_BLOCK in src/encast/ir/ops.py. Twice the usual reach: fewer would pack each
// key more often, more would compute more scores that nobody sees.
constexpr int64_t kLocalQueries = 128;

// first: row of qkv; the rest counts from there.
struct Span {
  int64_t first, len;
  int64_t query_begin, query_end;
};

// body(span) for all spans of a call. Blocks of queries are cut from query 0 of the sequence on, so that the
// keys of a span do not depend on the call.
template <class Body>
inline __attribute__((always_inline)) void each_span(const AttentionArgs& args, int64_t seq,
                                                     int64_t query_begin, int64_t query_end, Body body) {
  const int64_t first = args.cu_seqlens[seq];
  const int64_t len = args.seen == nullptr ? args.cu_seqlens[seq + 1] - first : args.seen[seq];
  for (int64_t query = query_begin; query < query_end;) {
    const int64_t block = args.reach == 0 ? 0 : query / kLocalQueries * kLocalQueries;
    const int64_t block_end = args.reach == 0 ? query_end : block + kLocalQueries;
    const int64_t end = block_end < query_end ? block_end : query_end;
    const int64_t key = args.reach < block ? block - args.reach : 0;
    const int64_t key_end = args.reach < len - block_end ? block_end + args.reach : len;
    if (args.reach == 0) {
      body(Span{first, len, query, end});
    } else {
      body(Span{first + key, key_end - key, query - key, end - key});
    }
    query = end;
  }
}

}  // namespace
}  // namespace encast
