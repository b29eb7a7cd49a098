#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "base/xxh64.h"
#include "bindings/bindings.h"
#include "cpu/isa.h"
#include "kernels/catalog.h"

namespace nb = nanobind;

namespace encast {
namespace {

nb::list list_isa_levels() {
  nb::list levels;
  for (const IsaInfo& level : isa_levels()) {
    const bool allowed = isa_allowed(level.isa), passed_over = allowed && level.isa > isa_best();
    levels.append(nb::make_tuple(level.name, level.features, level.missing, allowed,
                                 passed_over ? level.slow : std::string()));
  }
  return levels;
}

nb::list list_kernels() {
  nb::list rows;
  for (const KernelInfo& kernel : all_kernels()) {
    nb::dict row;
    row["family"] = kernel.family;
    row["op"] = kernel.op;
    row["name"] = kernel.name;
    row["arithmetic"] = kernel.arithmetic;
    row["isa"] = isa_name(kernel.isa);
    row["min_rows"] = kernel.min_rows;
    row["allowed"] = isa_allowed(kernel.isa);
    rows.append(row);
  }
  return rows;
}

nb::object name_of_selected(std::string_view op, std::string_view arithmetic, int64_t rows) {
  const KernelInfo* kernel = select_kernel(op, arithmetic, rows);
  return kernel == nullptr ? nb::none() : nb::object(nb::str(kernel->name));
}

// Any contiguous object with the buffer protocol: bytes, memoryview, mmap, an array.
class BufferView {
 public:
  explicit BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~BufferView() { PyBuffer_Release(&view_); }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  const void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

uint64_t hash_buffer(nb::object buffer, uint64_t seed) {
  const BufferView view(buffer);
  nb::gil_scoped_release release;
  return xxh64(view.data(), view.size(), seed);
}

}  // namespace

void bind_cpu(nb::module_& m) {
  m.def("isa_levels", &list_isa_levels,
        "Every ISA level, in the table's order: (name, features, missing features, allowed, slow).\n\n"
        "slow: why an allowed level is passed over for earlier ones, which are faster on this processor;\n"
        "empty for those that are not.\n\n"
        "Raises ResourceError when ENCAST_ISA names no level that this machine has.");
  m.def(
      "isa_best", [] { return std::string(isa_name(isa_best())); },
      "The last allowed ISA level that is not passed over as slow.");
  m.def("xxh64", &hash_buffer, nb::arg("buffer"), nb::arg("seed") = 0,
        "XXH64 of a contiguous buffer; runs without the GIL.");
  m.def("kernels", &list_kernels,
        "Every kernel as a dict: family, op, name, arithmetic, isa, min_rows, allowed (may run here).");
  m.def("select_kernel", &name_of_selected, nb::arg("op"), nb::arg("arithmetic"), nb::arg("rows"),
        "The name of the kernel that an operand of so many rows gets, or None when there is none.");
}

}  // namespace encast
