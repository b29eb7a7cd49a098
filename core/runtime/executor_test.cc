#include "runtime/executor.h"

#include <immintrin.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "base/error.h"
#include "runtime/test_plan.h"
#include "testing/check.h"

#if defined(__SANITIZE_THREAD__)
#define ENCAST_COUNTS_ALLOCATIONS 0
#elif defined(__has_feature)
#define ENCAST_COUNTS_ALLOCATIONS !__has_feature(thread_sanitizer)
#else
#define ENCAST_COUNTS_ALLOCATIONS 1
#endif

namespace {
std::atomic<long> allocations{0};
}

// Counts every allocation of the process through the replaceable operators; the core uses no malloc of its
// own. The thread sanitizer brings operators that cannot be replaced.
#if ENCAST_COUNTS_ALLOCATIONS
void* operator new(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace encast {
namespace {

struct Texts {
  std::vector<int32_t> ids, cu{0}, types, select;

  void add(int64_t length, testing::Rng& rng) {
    for (int64_t token = 0; token < length; ++token) {
      ids.push_back(static_cast<int32_t>(rng.integer(0, 49)));
      types.push_back(static_cast<int32_t>(rng.integer(0, 1)));
      if (rng.integer(0, 3) == 0) select.push_back(static_cast<int32_t>(ids.size()) - 1);
    }
    cu.push_back(static_cast<int32_t>(ids.size()));
  }
  Request request() const {
    return {ids.data(),
            static_cast<int64_t>(ids.size()),
            cu.data(),
            static_cast<int64_t>(cu.size()) - 1,
            types.data(),
            select.data(),
            static_cast<int64_t>(select.size())};
  }
};

std::vector<float> run(Executor& executor, const char* output, const Request& request) {
  const Executor::Shape shape = executor.output_shape(output, request);
  std::vector<float> out(static_cast<size_t>(shape.rows * shape.cols), NAN);
  executor.run(output, request, out.data());
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

class Model {
 public:
  Model() : file_(testing::test_weights()), weights_(std::make_shared<Weights>(file_.path())) {}
  std::unique_ptr<Executor> instance(int threads, int spin_us = 100,
                                     const std::string& plan = testing::kTestPlan) {
    return std::make_unique<Executor>(Plan::parse(plan), weights_, TeamOptions{threads, {}, spin_us});
  }

 private:
  testing::TemporaryFile file_;
  std::shared_ptr<Weights> weights_;
};

ENCAST_TEST(bits_depend_on_neither_neighbours_nor_threads_nor_chunks) {
  Model model;
  testing::Rng rng(1);
  Texts all;
  std::vector<Texts> alone;
  for (const int64_t length : {1, 40, 7, 17, 40, 40, 3, 25, 1, 1, 38, 16, 33}) {  // several chunks of 48
    testing::Rng copy = rng;
    all.add(length, rng);
    alone.emplace_back().add(length, copy);
  }
  const auto one = model.instance(1);
  for (const int threads : {1, 2, 3}) {
    const auto team = model.instance(threads, threads == 3 ? 0 : 100);
    for (const char* output : {"last_hidden_state", "embedding", "logits"}) {
      const std::vector<float> together = run(*team, output, all.request());
      std::vector<float> apart;
      for (const Texts& text : alone) {
        for (const float value : run(*one, output, text.request())) apart.push_back(value);
      }
      for (const float value : together) CHECK(std::isfinite(value));
      CHECK(same_bits(together, apart));
    }
  }
}

ENCAST_TEST(bits_are_those_of_values_with_places_of_their_own) {
  Model model;
  testing::Rng rng(5);
  std::string plan = testing::kTestPlan;
  const std::string apart = "value v5 f32 tokens 16 @28672";
  plan.replace(plan.find(apart), apart.size(), "value v5 f32 tokens 16 @20480");  // over v3
  for (const int threads : {1, 2, 3}) {
    const auto own = model.instance(threads), shared = model.instance(threads, 100, plan);
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{1}, {7}, {15}, {16}, {17}, {23}, {24}, {25}, {40}, {40, 8, 33, 40, 40, 7}}) {
      Texts texts;
      for (const int64_t length : lengths) texts.add(length, rng);
      for (const char* output : {"embedding", "logits", "last_hidden_state", "embedding"}) {
        CHECK(same_bits(run(*shared, output, texts.request()), run(*own, output, texts.request())));
      }
    }
  }
}

// Tasks of heads of a run; all of what a stage of heads did is one, or nothing is.
size_t head_tasks(const Trace& trace) {
  size_t tasks = 0, others = 0;
  for (const std::vector<TraceEvent>& events : trace.threads) {
    for (const TraceEvent& event : events) {
      if (event.step == 0) CHECK(!event.heads);
      if (event.step == 1) (event.heads ? tasks : others) += 1;
      if (event.step == 2) CHECK(event.heads == (others == 0));
    }
  }
  CHECK(tasks == 0 || others == 0);
  return tasks;
}

ENCAST_TEST(bits_do_not_depend_on_tasks_of_heads) {
  testing::Rng rng(8);
  std::vector<uint8_t> bytes(testing::HeadModel::kZeros + (64 << 10), 0);
  for (size_t at = 0; at < testing::HeadModel::kZeros; at += 4) {
    const float value = rng.uniform(-0.3f, 0.3f);
    std::memcpy(&bytes[at], &value, 4);
  }
  const testing::TemporaryFile file(bytes);
  const auto weights = std::make_shared<Weights>(file.path());
  const auto batch = [&](const std::vector<int64_t>& lengths) {
    Texts texts;
    for (const int64_t length : lengths) texts.add(length, rng);
    texts.types.assign(texts.ids.size(), 0);
    return texts;
  };
  const Texts many = batch({30, 1, 7, 120, 64, 200, 17, 90}), longest = batch({512, 80});
  const Texts too_long = batch({40, 513}), short_ones = batch(std::vector<int64_t>(60, 9)), one = batch({1});
  const testing::HeadModel models[] = {
      {},
      {.heads = 4, .head_dim = 32, .int8 = true},
      {.heads = 8, .head_dim = 80, .int8 = true},
      {.heads = 2, .head_dim = 64},
  };
  for (const testing::HeadModel& model : models) {
    const auto instance = [&](int64_t head_tokens, int threads) {
      return std::make_unique<Executor>(Plan::parse(model.plan(head_tokens)), weights,
                                        TeamOptions{threads, {}, 100});
    };
    const auto reference = instance(0, 1);
    for (const Texts* texts : {&many, &longest, &too_long, &short_ones, &one}) {
      const Request request = texts->request();
      const std::vector<float> want = run(*reference, "context", request);
      for (const float value : want) CHECK(std::isfinite(value));
      for (const int64_t head_tokens : {1, 32, 128}) {
        for (const int threads : {1, 2, 3}) {
          const auto team = instance(head_tokens, threads);
          CHECK(same_bits(run(*team, "context", request), want));
          if (texts != &many) continue;
          Trace trace;
          std::vector<float> out(want.size());
          team->run("context", request, out.data(), &trace);
          // With so many tokens a task there are several groups of the eight texts.
          CHECK(head_tasks(trace) > size_t{3});
        }
      }
      if (texts == &too_long) {
        Trace trace;
        std::vector<float> out(want.size());
        instance(128, 2)->run("context", request, out.data(), &trace);
        CHECK_EQ(head_tasks(trace), size_t{0});
      }
    }
  }
}

ENCAST_TEST(outputs_are_written_whole_and_nothing_else) {
  Model model;
  testing::Rng rng(2);
  Texts texts;
  for (int text = 0; text < 9; ++text) texts.add(rng.integer(1, 40), rng);
  const auto executor = model.instance(2);
  const Request request = texts.request();
  for (const char* output : {"last_hidden_state", "embedding", "logits"}) {
    const Executor::Shape shape = executor->output_shape(output, request);
    const auto size = static_cast<size_t>(shape.rows * shape.cols);
    std::vector<float> out(size + 64, -7.0f);
    executor->run(output, request, out.data());
    for (size_t index = size; index < out.size(); ++index) CHECK_EQ(out[index], -7.0f);
  }
}

ENCAST_TEST(a_forward_allocates_nothing) {
  if (!ENCAST_COUNTS_ALLOCATIONS) SKIP_TEST("the thread sanitizer's operator new does not count");
  Model model;
  testing::Rng rng(3);
  Texts texts;
  for (int text = 0; text < 12; ++text) texts.add(rng.integer(1, 40), rng);
  const Request request = texts.request();
  for (const int threads : {1, 2}) {
    const auto executor = model.instance(threads);
    std::vector<float> out(static_cast<size_t>(request.tokens * 32));
    for (const char* output : {"last_hidden_state", "embedding", "logits"}) {
      const long before = allocations.load();
      executor->run(output, request, out.data());
      CHECK_EQ(allocations.load() - before, 0L);
    }
  }
}

ENCAST_TEST(bits_do_not_depend_on_the_float_mode_of_the_caller) {
  Model model;
  testing::Rng rng(6);
  Texts texts;
  for (int text = 0; text < 9; ++text) texts.add(rng.integer(1, 40), rng);
  const auto made_before = model.instance(2);
  const std::vector<float> want = run(*made_before, "embedding", texts.request());
  const unsigned plain = _mm_getcsr();
  const unsigned odd = plain | 0x8040u | 0x4000u;  // subnormals flushed, rounding up
  _mm_setcsr(odd);
  const auto made_within = model.instance(2);
  const bool same = same_bits(run(*made_before, "embedding", texts.request()), want) &&
                    same_bits(run(*made_within, "embedding", texts.request()), want);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(plain);
  CHECK(same);
  CHECK_EQ(after & 0xffc0u, odd & 0xffc0u);  // all but the sticky flags
}

ENCAST_TEST(instances_run_side_by_side) {
  Model model;
  testing::Rng rng(4);
  Texts texts;
  for (int text = 0; text < 10; ++text) texts.add(rng.integer(1, 40), rng);
  const auto first = model.instance(2);
  const auto second = model.instance(2);
  const std::vector<float> want = run(*first, "embedding", texts.request());
  std::atomic<int> wrong{0};
  const auto work = [&](Executor& executor) {
    for (int round = 0; round < 20; ++round) {
      if (!same_bits(run(executor, "embedding", texts.request()), want)) wrong.fetch_add(1);
    }
  };
  // Two callers of one instance take turns.
  std::thread a([&] { work(*first); }), b([&] { work(*second); }), c([&] { work(*first); });
  a.join();
  b.join();
  c.join();
  CHECK_EQ(wrong.load(), 0);
}

ENCAST_TEST(requests_out_of_range_are_refused) {
  Model model;
  const auto executor = model.instance(1);
  testing::Rng rng(5);
  Texts good;
  good.add(5, rng);
  good.add(6, rng);
  good.select = {1, 7};
  run(*executor, "logits", good.request());
  const auto refused = [&](auto change) {
    Texts bad = good;
    change(bad);
    std::vector<float> out(1000);
    CHECK_THROWS(executor->run("logits", bad.request(), out.data()), InputError, "");
  };
  refused([](Texts& t) { t.ids[3] = 50; });
  refused([](Texts& t) { t.ids[3] = -1; });
  refused([](Texts& t) { t.types[3] = 2; });
  refused([](Texts& t) { t.cu[1] = 0; });
  refused([](Texts& t) { t.cu[1] = 12; });
  refused([](Texts& t) { t.cu[0] = 1; });
  refused([](Texts& t) { t.cu[2] = 10; });
  refused([](Texts& t) { t.select = {7, 1}; });
  refused([](Texts& t) { t.select = {1, 1}; });
  refused([](Texts& t) { t.select = {11}; });
  refused([](Texts& t) { t.select = {-1}; });
  refused([&](Texts& t) { t.add(41, rng); });
  CHECK_THROWS(run(*executor, "nothing", good.request()), InputError, "it has: last_hidden_state");
}

ENCAST_TEST(an_empty_batch_gives_no_rows) {
  Model model;
  const auto executor = model.instance(2);
  const Texts none;
  CHECK_EQ(run(*executor, "embedding", none.request()).size(), size_t{0});
}

ENCAST_TEST(damaged_weights_are_found) {
  std::vector<uint8_t> bytes = testing::test_weights();
  const testing::TemporaryFile file(bytes);
  const auto weights = std::make_shared<Weights>(file.path());
  const auto verify = [&](const std::vector<TensorRange>& tensors, int threads) {
    Verification(weights, tensors, threads).wait();
  };
  verify({}, 2);
  for (const int threads : {0, 1, 2}) {
    CHECK_THROWS((verify({{"small", 0, 16, 1}, {"word", 0, 3200, 1}}, threads)), ArtifactError,
                 "checksum of");
  }
  CHECK_THROWS((verify({{"word", 0, 3200, 1}}, 2)), ArtifactError, "checksum of tensor word");
  CHECK_THROWS((verify({{"word", 64, ~uint64_t{0}, 1}}, 1)), ArtifactError, "outside of the file");
  CHECK_THROWS((verify({{"word", bytes.size() + 1, 0, 1}}, 1)), ArtifactError, "outside of the file");
  Verification closed(weights, {{"word", 0, 3200, 1}}, 0);
  closed.close();
  closed.wait();  // nothing was left to check
  CHECK_THROWS(Weights("/nonexistent/weights"), ArtifactError, "cannot be opened");
  CHECK_THROWS(Weights("/tmp"), ArtifactError, "regular file");
  // A pipe would block until somebody writes to it.
  const std::string pipe = file.path() + ".pipe";
  CHECK_EQ(mkfifo(pipe.c_str(), 0600), 0);
  alarm(10);
  CHECK_THROWS((Weights(pipe)), ArtifactError, "regular file");
  alarm(0);
  unlink(pipe.c_str());
}

ENCAST_TEST(a_run_stops_for_another_one_and_goes_on) {
  Model model;
  testing::Rng rng(3);
  Texts text, other;
  for (const int64_t length : {40, 33, 40, 7}) text.add(length, rng);  // several chunks of 48
  while (other.select.empty()) other.add(5, rng);                      // logits are of selected rows
  const auto inner = model.instance(1);
  struct Stop {
    Executor& executor;
    const Texts& text;
    std::atomic<bool> asked{true};
    long rest = 1000000;  // how often it asks for another stop
    std::vector<std::vector<float>> rows;

    static void go(void* data) {
      auto& self = *static_cast<Stop*>(data);
      self.rows.push_back(run(self.executor, "logits", self.text.request()));
      if (self.rest-- > 0) self.asked = true;
    }
  };
  const auto stopped = [&](Executor& executor, const char* output, Stop& stop) {
    const Executor::Shape shape = executor.output_shape(output, text.request());
    std::vector<float> out(static_cast<size_t>(shape.rows * shape.cols), NAN);
    const Pause pause{stop.asked, &Stop::go, &stop};
    executor.run(output, text.request(), out.data(), nullptr, &pause);
    return out;
  };
  const std::vector<float> alone = run(*inner, "logits", other.request());
  for (const int threads : {1, 2, 3}) {
    const auto outer = model.instance(threads);
    for (const char* output : {"last_hidden_state", "embedding", "logits"}) {
      Stop always{*inner, other};
      CHECK(same_bits(stopped(*outer, output, always), run(*outer, output, text.request())));
      CHECK(always.rows.size() > (threads == 1 ? size_t{10} : size_t{1}));
      for (const auto& rows : always.rows) CHECK(same_bits(rows, alone));
      Stop once{.executor = *inner, .text = other, .rest = 0};
      stopped(*outer, output, once);
      CHECK_EQ(once.rows.size(), size_t{1});
    }
  }
}

ENCAST_TEST(copied_weights_are_of_this_process_alone) {
  const std::vector<uint8_t> bytes = testing::test_weights();
  const testing::TemporaryFile file(bytes);
  const Weights mapped(file.path()), copied(file.path(), true);
  CHECK_EQ(copied.bytes(), uint64_t{bytes.size()});
  const auto differs = [&](const Weights& weights) {
    return std::memcmp(weights.data(), bytes.data(), bytes.size()) != 0;
  };
  CHECK(!differs(mapped) && !differs(copied));
  const uint8_t other = static_cast<uint8_t>(~bytes[0]);
  FILE* const writer = std::fopen(file.path().c_str(), "r+");
  CHECK(writer != nullptr);
  CHECK_EQ(std::fwrite(&other, 1, 1, writer), size_t{1});
  std::fclose(writer);
  CHECK(differs(mapped) && !differs(copied));
  CHECK_THROWS(Weights("/nonexistent/weights", true), ArtifactError, "cannot be opened");
}

}  // namespace
}  // namespace encast

ENCAST_TEST_MAIN
