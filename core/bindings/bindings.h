#pragma once
#include <nanobind/nanobind.h>

// One function a subject; module.cc calls them in turn.
namespace encast {

void bind_cpu(nanobind::module_& m);
void bind_peak(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_runtime(nanobind::module_& m);
void bind_timing(nanobind::module_& m);

}  // namespace encast
