#include "simd/probe_impl.h"

namespace encast {

ProbeTable probe_table_avx512() { return avx512::probe_table(); }

}  // namespace encast
