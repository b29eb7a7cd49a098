#include "simd/probe_impl.h"

namespace encast {

ProbeTable probe_table_scalar() { return scalar::probe_table(); }

}  // namespace encast
