// Copies of KV pages in host memory.
#include "kernels/host_kernels.h"

namespace isobit {

void CopyHostPages(const CopyPagesArgs& args) {
  for (const PageCopy& copy : args.copies) {
    for (int64_t plane = 0; plane < args.num_planes; ++plane) {
      Bf16* const pages = args.planes + plane * args.plane_stride;
      std::copy_n(pages + copy.from * args.page_elements, args.page_elements,
                  pages + copy.to * args.page_elements);
    }
  }
}

}  // namespace isobit
