#include "simd/probe_impl.h"

namespace encast {

ProbeTable probe_table_avx2() { return avx2::probe_table(); }

}  // namespace encast
