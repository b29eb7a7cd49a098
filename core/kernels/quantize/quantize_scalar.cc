#include "kernels/quantize/quantize_impl.h"

namespace encast {

void quantize_f32_scalar(const NarrowArgs& args, int64_t row_begin, int64_t row_end) {
  scalar::narrow_rows(args, row_begin, row_end);
}

}  // namespace encast
