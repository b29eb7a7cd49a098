#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "runtime/plan.h"
#include "testing/random.h"

// A small model for the runtime's own tests: embedding, one product in every dtype, attention, norm, pooling.
namespace encast::testing {

constexpr const char* kTestPlan =
    "encast-plan 1\n"
    "limits vocab=50 types=2 max_len=40 chunk_tokens=48 arena=262144 block_rows=16 "
    "stream_rows=8 head_tokens=0 block=1152 exact=0\n"
    "weight w0 f32 dense 50 16 @0\n"
    "weight w1 f32 dense 42 16 @3200\n"
    "weight w2 f32 dense 2 16 @5888\n"
    "weight w3 f32 dense 1 16 @6016\n"
    "weight w4 f32 dense 1 16 @6080\n"
    "weight w5 s8 panels 48 16 @6144\n"
    "weight w6 f32 padded 1 48 @7168\n"
    "weight w7 i32 padded 1 48 @7424\n"
    "weight w8 f32 padded 1 48 @7680\n"
    "weight w9 f32 panels 16 16 @7936\n"
    "weight w10 f32 padded 1 16 @12032\n"
    "value v0 f32 tokens 16 @0\n"
    "value v1 q8 tokens 16 @+0\n"
    "value v2 f32 tokens 48 @8192\n"
    "value v3 f32 tokens 16 @20480\n"
    "value v4 f32 tokens 16 @+0\n"
    "value v5 f32 tokens 16 @28672\n"
    "value v6 f32 seqs 32 @40960\n"
    "value v7 f32 seqs 32 @-\n"
    "value v8 f32 selected 16 @49152\n"
    "value v9 f32 selected 16 @-\n"
    "stage rows\n"
    "step embed name=embeddings word=w0 position=w1 token_type=w2 gamma=w3 beta=w4 eps=1e-12 offset=2 skip=1 "
    "out=v0 also=v1\n"
    "step linear name=qkv x=v1 w=w5 scale=w6 colsum=w7 bias=w8 act=none arithmetic=s8 out=v2\n"
    "stage sequences\n"
    "step attention name=attention x=v2 heads=2 factor=0.35 arithmetic=f32 out=v3\n"
    "stage rows\n"
    "step linear name=dense x=v3 w=w9 bias=w10 act=gelu arithmetic=f32 out=v4\n"
    "step norm name=norm x=v4 other=v0 gamma=w3 beta=w4 eps=1e-5 out=v5\n"
    "stage rows\n"
    "step pool name=pool x=v5 mode=mean column=0 out=v6\n"
    "step pool name=pool x=v5 mode=max column=16 out=v6\n"
    "step normalize name=unit x=v6 out=v7\n"
    "stage rows\n"
    "step select name=rows x=v5 out=v8\n"
    "step elementwise name=act x=v8 factor=1 act=relu out=v9\n"
    "output last_hidden_state v5\n"
    "output embedding v7\n"
    "output logits v9\n";

constexpr uint64_t kTestWeightBytes = 12032 + 256;

// Bytes for the weights of kTestPlan: small floats, integers in the int8 panel, its column sums.
inline std::vector<uint8_t> test_weights() {
  Rng rng(7);
  std::vector<uint8_t> bytes(kTestWeightBytes, 0);
  const auto put = [&](size_t offset, size_t count, float low, float high) {
    for (size_t index = 0; index < count; ++index) {
      const float value = rng.uniform(low, high);
      std::memcpy(&bytes[offset + 4 * index], &value, 4);
    }
  };
  put(0, 50 * 16, -1, 1);
  put(3200, 42 * 16, -1, 1);
  put(5888, 2 * 16, -1, 1);
  put(6016, 16, 0.5f, 1.5f);
  put(6080, 16, -0.5f, 0.5f);
  int32_t colsum[64] = {};
  for (size_t quad = 0; quad < 4; ++quad) {
    for (size_t col = 0; col < 48; ++col) {
      for (size_t lane = 0; lane < 4; ++lane) {
        const auto value = static_cast<int8_t>(rng.integer(-127, 127));
        bytes[6144 + quad * 256 + col * 4 + lane] = static_cast<uint8_t>(value);
        colsum[col] += value;
      }
    }
  }
  put(7168, 48, 0.001f, 0.01f);
  std::memcpy(&bytes[7424], colsum, sizeof colsum);
  put(7680, 48, -1, 1);
  for (size_t row = 0; row < 16; ++row) put(7936 + row * 256, 16, -0.5f, 0.5f);
  put(12032, 16, -1, 1);
  return bytes;
}

// Attention and the product before it, with texts of up to 600 tokens.
struct HeadModel {
  int64_t heads = 4, head_dim = 32;
  bool int8 = false;

  // In a stage of heads, or with head_tokens = 0 apart.
  std::string plan(int64_t head_tokens) const {
    const auto text = [](int64_t number) { return std::to_string(number); };
    const int64_t hidden = heads * head_dim, stride = round_up(hidden, 64);
    const std::string h = text(hidden), w = text(3 * hidden);
    const int64_t v1 = 600 * stride * 4 + 2 * 2432, v2 = v1 + 600 * stride * 4;
    std::string plan = "encast-plan 1\nlimits vocab=50 types=0 max_len=600 chunk_tokens=600 arena=" +
                       text(v2 + 600 * 3 * stride * 4) +
                       " block_rows=16 stream_rows=8 head_tokens=" + text(head_tokens) + " block=0 exact=0\n";
    plan += "weight w0 f32 dense 50 " + h + " @0\nweight w1 f32 dense 1 " + h + " @0\n";
    plan += "weight w2 " + std::string(int8 ? "s8" : "f32") + " panels " + w + " " + h + " @0\n";
    plan += "weight w3 f32 padded 1 " + w + " @64\nweight w4 i32 padded 1 " + w + " @" + text(kZeros) + "\n";
    plan += "weight w5 f32 dense " + text(heads) + " 1199 @128\n";
    plan += "value v0 f32 tokens " + h + " @0\nvalue v1 q8 tokens " + h + " @" + text(v1) +
            "\nvalue v2 f32 tokens " + w + " @" + text(v2) + "\nvalue v3 f32 tokens " + h + " @-\n";
    plan += "stage rows\n";
    plan += "step embed name=embeddings word=w0 gamma=w1 beta=w1 eps=1e-12 offset=0 skip=-1 out=v0 also=v1\n";
    plan += head_tokens > 0 ? "stage heads\n" : "";
    plan += int8 ? "step linear name=qkv x=v1 w=w2 scale=w3 colsum=w4 bias=w3 act=none arithmetic=s8 out=v2\n"
                 : "step linear name=qkv x=v0 w=w2 bias=w3 act=none arithmetic=f32 out=v2\n";
    plan += head_tokens > 0 ? "" : "stage sequences\n";
    plan += "step attention name=attention x=v2 heads=" + text(heads) +
            " factor=0.18 bias=w5 arithmetic=" + (int8 ? "s8" : "f32") + " out=v3\noutput context v3\n";
    return plan;
  }

  static constexpr int64_t kZeros = 2 << 20;  // of the file of weights
};

// A file that is gone when the test ends.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::vector<uint8_t>& bytes) {
    char name[] = "/tmp/encast-test-XXXXXX";
    const int file = mkstemp(name);
    path_ = name;
    FILE* stream = fdopen(file, "wb");
    std::fwrite(bytes.data(), 1, bytes.size(), stream);
    std::fclose(stream);
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace encast::testing
