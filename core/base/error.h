#pragma once
#include <stdexcept>
#include <string>

// Errors of the native core. Kernels never throw; the loader, the runtime and the bindings do.
// The bindings translate each to the Python class of the same name in encast.errors.
namespace encast {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PlanError : Error {
  using Error::Error;
};
struct ArtifactError : Error {
  using Error::Error;
};
struct InputError : Error {
  using Error::Error;
};
struct ResourceError : Error {
  using Error::Error;
};

}  // namespace encast
