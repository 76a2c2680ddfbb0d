// How the process's allocator treats large blocks.
#ifndef ISOBIT_COMMON_BASE_ALLOCATOR_H_
#define ISOBIT_COMMON_BASE_ALLOCATOR_H_

#include <cstddef>

namespace isobit {

// For main: a block of 1 MiB or more goes back to the system when it is freed. Else glibc raises
// its threshold with the first such block, and each of the many threads that pack weights keeps
// blocks of a layer's size in an arena of its own, which looks like a leak over weight updates.
void ReturnLargeBlocksWhenFreed();

// Bytes of the blocks below 1 MiB that are allocated now.
size_t SmallBlockBytes();

// Gives memory that is free to the system, of every arena. Takes milliseconds, in which threads
// that allocate may wait: for after what was unusually large.
void ReturnFreeMemory();

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_ALLOCATOR_H_
