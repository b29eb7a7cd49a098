#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>

#include "base/error.h"
#include "bindings/bindings.h"
#include "runtime/executor.h"
#include "runtime/pool.h"

namespace encast {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows2d = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::c_contig>;

const int32_t* data_or_null(const std::optional<Ids>& ids) { return ids ? ids->data() : nullptr; }

Request request_of(const Ids& token_ids, const Ids& cu_seqlens, const std::optional<Ids>& token_type_ids,
                   const std::optional<Ids>& select) {
  if (cu_seqlens.shape(0) == 0) throw InputError("cu_seqlens is empty; it holds n + 1 offsets, 0 first");
  if (token_type_ids && token_type_ids->shape(0) != token_ids.shape(0)) {
    throw InputError("token_type_ids and token_ids differ in their lengths");
  }
  Request request;
  request.token_ids = token_ids.data();
  request.tokens = static_cast<int64_t>(token_ids.shape(0));
  request.cu_seqlens = cu_seqlens.data();
  request.seqs = static_cast<int64_t>(cu_seqlens.shape(0)) - 1;
  request.token_type_ids = data_or_null(token_type_ids);
  request.select = data_or_null(select);
  request.selected = select ? static_cast<int64_t>(select->shape(0)) : 0;
  return request;
}

// A path as the file system spells it, which need not be UTF-8.
std::string path_of(nb::handle path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw nb::python_error();
  const nb::object owner = nb::steal(bytes);
  return {PyBytes_AsString(bytes), static_cast<size_t>(PyBytes_Size(bytes))};
}

// An executor for every list of CPUs.
std::vector<std::unique_ptr<Executor>> executors_of(std::string_view plan,
                                                    const std::shared_ptr<Weights>& weights, int threads,
                                                    const std::vector<std::vector<int>>& cpus, int spin_us,
                                                    int idle_spin_us) {
  const Plan parsed = Plan::parse(plan);
  std::vector<std::unique_ptr<Executor>> executors;
  for (const std::vector<int>& own : cpus) {
    executors.push_back(
        std::make_unique<Executor>(parsed, weights, TeamOptions{threads, own, spin_us, idle_spin_us}));
  }
  return executors;
}

// A free executor. Waits without the GIL, and hears Ctrl-C while it does.
ExecutorPool::Lease lease_of(ExecutorPool& pool) {
  constexpr std::chrono::milliseconds kBetweenSignals{100};
  for (;;) {
    ExecutorPool::Lease lease = pool.lease_within(kBetweenSignals);
    if (lease) return lease;
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// Whether a run shall stop for other work.
struct Interrupt {
  std::atomic<bool> asked{false};
};

// What a run stops for. An error of it ends no run: it is raised after it.
class Between {
 public:
  Between(Interrupt& interrupt, nb::handle go) : go_(go), pause_{interrupt.asked, &call, this} {}
  const Pause* pause() const { return &pause_; }
  void raise() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  static void call(void* data) {
    auto& self = *static_cast<Between*>(data);
    if (self.error_) return;
    const nb::gil_scoped_acquire acquire;
    try {
      self.go_();
    } catch (...) {
      self.error_ = std::current_exception();
    }
  }

  nb::handle go_;  // the caller's
  std::exception_ptr error_;
  const Pause pause_;
};

Rows2d run(ExecutorPool& pool, std::string_view output, const Ids& token_ids, const Ids& cu_seqlens,
           const std::optional<Ids>& token_type_ids, const std::optional<Ids>& select, Trace* trace,
           const Pause* pause) {
  const Request request = request_of(token_ids, cu_seqlens, token_type_ids, select);
  Executor::Shape shape;
  std::unique_ptr<float[]> memory;
  {
    const nb::gil_scoped_release release;
    const ExecutorPool::Lease executor = lease_of(pool);
    shape = executor->output_shape(output, request);
    memory = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(shape.rows * shape.cols));
    executor->run(output, request, memory.get(), trace, pause);
  }
  float* data = memory.release();
  nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<float*>(pointer); });
  return Rows2d(data, {static_cast<size_t>(shape.rows), static_cast<size_t>(shape.cols)}, owner);
}

constexpr size_t kEventFields = 9;
using Events = nb::ndarray<int64_t, nb::numpy, nb::shape<-1, kEventFields>, nb::c_contig>;

// Events as rows of thread, step, chunk, first row, rows, begin and end in nanoseconds from the run's begin,
// 1 for tasks of heads, and the rows of a sparse product that its dense form multiplied.
Events events_of(const Trace& trace) {
  size_t count = 0;
  for (const auto& events : trace.threads) count += events.size();
  auto memory = std::make_unique_for_overwrite<int64_t[]>(kEventFields * count);
  int64_t* to = memory.get();
  for (const auto& events : trace.threads) {
    for (const TraceEvent& event : events) {
      for (const int64_t field : {int64_t{event.thread}, int64_t{event.step}, int64_t{event.chunk},
                                  event.first_row, event.rows, event.begin_ns - trace.begin_ns,
                                  event.end_ns - trace.begin_ns, int64_t{event.heads}, event.dense_rows}) {
        *to++ = field;
      }
    }
  }
  int64_t* data = memory.release();
  nb::capsule owner(data, [](void* pointer) noexcept { delete[] static_cast<int64_t*>(pointer); });
  return Events(data, {count, kEventFields}, owner);
}

}  // namespace

void bind_runtime(nb::module_& m) {
  nb::class_<Weights>(m, "Weights", "A weights file, mapped read-only and shared between processes.")
      .def(
          "__init__",
          [](Weights* self, nb::object path, bool copy) {
            const std::string native = path_of(path);
            nb::gil_scoped_release release;
            new (self) Weights(native, copy);
          },
          "path"_a, "copy"_a = false,
          "`copy`: reads the file into huge pages of this process's own, where the kernel has them.");

  nb::class_<Verification>(m, "Verification", "Checks the bytes of weights on threads of its own.")
      .def(
          "__init__",
          [](Verification* self, const std::shared_ptr<Weights>& weights,
             const std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>>& tensors, int threads) {
            std::vector<TensorRange> ranges;
            for (const auto& [name, offset, bytes, hash] : tensors)
              ranges.push_back({name, offset, bytes, hash});
            nb::gil_scoped_release release;
            new (self) Verification(weights, std::move(ranges), threads);
          },
          "weights"_a, "tensors"_a, "threads"_a,
          "`tensors`: (name, offset, bytes, xxh64) of each; raises ArtifactError for one outside of the "
          "file.")
      .def("wait", &Verification::wait, nb::call_guard<nb::gil_scoped_release>(),
           "Until all is checked; raises ArtifactError for a tensor that differs.")
      .def("close", &Verification::close, nb::call_guard<nb::gil_scoped_release>(),
           "Leaves out what no thread has begun with.");

  nb::class_<Interrupt>(m, "Interrupt", "Asks a run to let other work go first on its thread.")
      .def(nb::init<>())
      .def(
          "ask", [](Interrupt& self) { self.asked.store(true); }, "From any thread.");

  nb::class_<ExecutorPool>(m, "ExecutorPool",
                           "Executors over shared weights, each with an arena and a team of threads; a call "
                           "takes a free one or waits for it.")
      .def(
          "__init__",
          [](ExecutorPool* self, std::string_view plan, const std::shared_ptr<Weights>& weights, int threads,
             const std::vector<std::vector<int>>& cpus, int spin_us, int idle_spin_us) {
            const nb::gil_scoped_release release;
            new (self) ExecutorPool(executors_of(plan, weights, threads, cpus, spin_us, idle_spin_us));
          },
          "plan"_a, "weights"_a, "threads"_a, "cpus"_a, "spin_us"_a, "idle_spin_us"_a,
          "`cpus`: for every instance a list with a CPU for each of its threads, or an empty one: no "
          "pinning.")
      .def(
          "run",
          [](ExecutorPool& self, std::string_view output, const Ids& token_ids, const Ids& cu_seqlens,
             const std::optional<Ids>& token_type_ids, const std::optional<Ids>& select, Interrupt* interrupt,
             nb::handle between) {
            if (interrupt == nullptr) {
              return run(self, output, token_ids, cu_seqlens, token_type_ids, select, nullptr, nullptr);
            }
            Between stops(*interrupt, between);
            Rows2d rows =
                run(self, output, token_ids, cu_seqlens, token_type_ids, select, nullptr, stops.pause());
            stops.raise();
            return rows;
          },
          "output"_a, "token_ids"_a, "cu_seqlens"_a, "token_type_ids"_a.none() = nb::none(),
          "select"_a.none() = nb::none(), "interrupt"_a.none() = nb::none(), "between"_a = nb::none(),
          "f32[rows, cols] of an output; raises InputError, and ResourceError once closed.\n"
          "After each `interrupt.ask()` it calls `between` once, soon, on this thread between two blocks of "
          "rows, and\n"
          "raises after the run what `between` raises.")
      .def(
          "trace",
          [](ExecutorPool& self, std::string_view output, const Ids& token_ids, const Ids& cu_seqlens,
             const std::optional<Ids>& token_type_ids, const std::optional<Ids>& select) {
            Trace trace;
            Rows2d rows = run(self, output, token_ids, cu_seqlens, token_type_ids, select, &trace, nullptr);
            return std::make_tuple(rows, trace.end_ns - trace.begin_ns, events_of(trace));
          },
          "output"_a, "token_ids"_a, "cu_seqlens"_a, "token_type_ids"_a.none() = nb::none(),
          "select"_a.none() = nb::none(),
          "As run, and what every thread did: the run's nanoseconds, and i64[events, 9] of thread, step of "
          "the plan,\n"
          "chunk, first row, rows, begin and end in nanoseconds from the run's begin, 1 for a task of "
          "heads,\nand the rows of a sparse product that its dense form multiplied.")
      .def(
          "kernels",
          [](ExecutorPool& self) {
            const nb::gil_scoped_release release;
            return lease_of(self)->kernels();
          },
          "Names of the kernels of every step of the plan, in order.")
      .def("close", &ExecutorPool::close, nb::call_guard<nb::gil_scoped_release>(),
           "Waits for running calls, then frees arenas and threads; later calls raise ResourceError.");
}

}  // namespace encast
