// How the process's allocator treats large blocks.
#ifndef ISOBIT_COMMON_BASE_ALLOCATOR_H_
#define ISOBIT_COMMON_BASE_ALLOCATOR_H_

#include <cstddef>

namespace isobit {

// For main. Afterwards every block of 1 MiB or more returns to the system when it is freed. By
// default, glibc raises that threshold when the first such block is freed; then each thread that
// packs weights keeps blocks of a layer's size in its own arena, which looks like a leak over
// several weight updates.
void ReturnLargeBlocksWhenFreed();

// Bytes of the blocks below 1 MiB that are allocated now.
size_t SmallBlockBytes();

// Returns the free memory of all arenas to the system. Takes milliseconds, during which threads
// that allocate may wait: call it only after an unusually large release of memory.
void ReturnFreeMemory();

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_ALLOCATOR_H_
