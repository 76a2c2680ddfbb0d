// The ranks of one process on GPUs that map each other's memory, and the memory that all of them
// reach. Not here: what they store in it, and when it is safe to read
// (kernels/cuda/collective/all_reduce.h).
#ifndef ISOBIT_COMMON_PARALLEL_PEER_GROUP_H_
#define ISOBIT_COMMON_PARALLEL_PEER_GROUP_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace isobit {

// A buffer of the same size on every rank's device. Every rank's kernels may load from and store to
// every one of them; over NVLink where the devices differ.
class PeerMemory {
 public:
  PeerMemory() = default;
  PeerMemory(PeerMemory&& other) noexcept;
  PeerMemory& operator=(PeerMemory&& other) noexcept;
  ~PeerMemory();  // waits for the devices

  std::byte* of_rank(int rank) const { return buffers_[static_cast<size_t>(rank)].bytes; }
  size_t bytes() const { return bytes_; }  // on each rank's device

 private:
  friend class PeerGroup;
  struct Buffer {
    int device;
    std::byte* bytes;
  };
  std::vector<Buffer> buffers_;
  size_t bytes_ = 0;
};

// Made once, before the ranks' threads start; nothing in it changes afterwards. Copyable. The calls
// leave the calling thread's device as it was.
class PeerGroup {
 public:
  // Rank r runs on CUDA device devices[r]; several ranks may share one.
  // INVALID_ARGUMENT: not a number of ranks (rank_count.h). FAILED_PRECONDITION: no such device, or
  // two devices that cannot map each other's memory, both named.
  static absl::StatusOr<PeerGroup> Create(absl::Span<const int> devices);

  int size() const { return static_cast<int>(devices_.size()); }
  int device(int rank) const { return devices_[static_cast<size_t>(rank)]; }
  // The most ranks that share a device.
  int most_ranks_on_a_device() const;

  // Allocates a buffer on every rank's device; every byte is `fill`. RESOURCE_EXHAUSTED: a device
  // has not that much memory.
  absl::StatusOr<PeerMemory> Allocate(size_t bytes, unsigned char fill) const;

 private:
  explicit PeerGroup(absl::Span<const int> devices) : devices_(devices.begin(), devices.end()) {}
  std::vector<int> devices_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_PEER_GROUP_H_
