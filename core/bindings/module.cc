#include <nanobind/nanobind.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace {

// Raises the class of encast.errors that has the native error's name.
void set_python_error(const char* name, const char* message) {
  const nb::object type = nb::module_::import_("encast.errors").attr(name);
  PyErr_SetString(type.ptr(), message);
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const encast::PlanError& error) {
    set_python_error("PlanError", error.what());
  } catch (const encast::ArtifactError& error) {
    set_python_error("ArtifactError", error.what());
  } catch (const encast::InputError& error) {
    set_python_error("InputError", error.what());
  } catch (const encast::ResourceError& error) {
    set_python_error("ResourceError", error.what());
  } catch (const encast::Error& error) {
    set_python_error("EncastError", error.what());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of encast: kernels, runtime, machine facts.";
  nb::register_exception_translator(translate);
  encast::bind_cpu(m);
  encast::bind_peak(m);
  encast::bind_plan(m);
  encast::bind_runtime(m);
  encast::bind_timing(m);
}
