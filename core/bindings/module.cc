#include "bindings/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "The native core of encast: kernels, runtime, machine facts.";
  encast::bind_cpu(m);
  encast::bind_runtime(m);
}
