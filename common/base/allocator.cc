// glibc's malloc: its threshold for mapped blocks, and the trim of free ones.
#include "common/base/allocator.h"

#include <malloc.h>

namespace isobit {

void ReturnLargeBlocksWhenFreed() {
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // setting it also stops glibc from changing it
  mallopt(M_MMAP_MAX, 1 << 20);        // blocks at one time; 65536 by default
}

size_t SmallBlockBytes() { return mallinfo2().uordblks; }

void ReturnFreeMemory() { malloc_trim(0); }

}  // namespace isobit
