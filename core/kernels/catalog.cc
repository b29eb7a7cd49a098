#include "kernels/catalog.h"

#include <algorithm>
#include <type_traits>

#include "kernels/attention/attention.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/embed/embed.h"
#include "kernels/gated/gated.h"
#include "kernels/gemm/gemm.h"
#include "kernels/norm/norm.h"
#include "kernels/quantize/quantize.h"
#include "kernels/reduce/reduce.h"
#include "kernels/rotary/rotary.h"
#include "kernels/sparse/sparse.h"

namespace encast {

#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, FunctionType) \
  extern std::remove_pointer_t<FunctionType> name;
#include "kernels/manifest.inc"
#undef ENCAST_KERNEL

std::span<const KernelInfo> all_kernels() {
  static const KernelInfo kernels[] = {
#define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, FunctionType) \
  {ENCAST_FAMILY, #op, #name, #arithmetic, Isa::isa, min_rows, reinterpret_cast<AnyKernel>(&name)},
#include "kernels/manifest.inc"
#undef ENCAST_KERNEL
  };
  return kernels;
}

const KernelInfo* select_kernel(std::string_view op, std::string_view arithmetic, int64_t rows) {
  const KernelInfo* best = nullptr;
  for (const KernelInfo& kernel : all_kernels()) {
    if (kernel.op != op || kernel.arithmetic != arithmetic) continue;
    // A step over no rows still names a kernel: its loops are empty.
    if (kernel.min_rows > std::max<int64_t>(rows, 1) || !isa_allowed(kernel.isa)) continue;
    if (best == nullptr || kernel.isa > best->isa ||
        (kernel.isa == best->isa && kernel.min_rows > best->min_rows)) {
      best = &kernel;
    }
  }
  return best;
}

}  // namespace encast
