#include "kernels/elementwise/elementwise_impl.h"

namespace encast {

void elementwise_f32_scalar(const ElementwiseArgs& args, int64_t row_begin, int64_t row_end) {
  scalar::elementwise_rows(args, row_begin, row_end);
}

}  // namespace encast
