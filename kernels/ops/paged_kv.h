// Where keys and values of served sequences are: pages of a cache, and copies of pages.
#ifndef ISOBIT_KERNELS_OPS_PAGED_KV_H_
#define ISOBIT_KERNELS_OPS_PAGED_KV_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/contract/portable.h"

namespace isobit {

// One layer's paged KV cache on this rank. Position p of a sequence is in its page p / page_size,
// at slot p % page_size.
struct PagedKv {
  Bf16* k = nullptr;  // [num_pages, kv_heads, page_size, head_dim]
  Bf16* v = nullptr;  // likewise
  int32_t page_size = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};

// A copy of one page to another, in every layer's cache.
struct PageCopy {
  int32_t from = 0;
  int32_t to = 0;
};

// Page `to` = page `from`, in all planes, for each copy in order. A plane is one layer's keys, or
// its values: [num_pages, page_elements].
struct CopyPagesArgs {
  Bf16* planes = nullptr;  // the first plane
  int64_t num_planes = 0;
  int64_t plane_stride = 0;           // elements from one plane to the next
  int64_t page_elements = 0;          // elements of a page in a plane
  absl::Span<const PageCopy> copies;  // in host memory that may be reused on return
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_PAGED_KV_H_
