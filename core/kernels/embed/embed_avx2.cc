#include "kernels/embed/embed_impl.h"

namespace encast {

void embed_f32_avx2(const EmbedArgs& args, int64_t row_begin, int64_t row_end) {
  avx2::embed_rows(args, row_begin, row_end);
}

}  // namespace encast
