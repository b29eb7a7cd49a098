#include "cpu/peak.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace encast {

void bind_peak(nb::module_& m) {
  using namespace nb::literals;
  m.def("peak_ops_per_second", &peak_ops_per_second, "dtype"_a, "threads"_a, "seconds"_a,
        nb::call_guard<nb::gil_scoped_release>(),
        "Multiplications and additions a second that `threads` threads reach with the product instruction\n"
        "of the best allowed level for \"f32\", \"bf16\" or \"int8\", operands in registers. Takes `seconds` "
        "(0 to 60).\n"
        "Raises InputError.");
}

}  // namespace encast
