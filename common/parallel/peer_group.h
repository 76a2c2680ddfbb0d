// The ranks of one process whose GPUs map each other's memory, and memory that all of them can
// reach. Not here: what they store in it, and when it is safe to read
// (kernels/cuda/sm90/collective/all_reduce.h).
#ifndef ISOBIT_COMMON_PARALLEL_PEER_GROUP_H_
#define ISOBIT_COMMON_PARALLEL_PEER_GROUP_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace isobit {

// A buffer of the same size on every rank's device. Every rank's kernels may load from and store to
// all of these buffers; between devices, over NVLink.
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

// Made once, before the ranks' threads start; it then never changes. Copyable. Calls leave the
// calling thread's current device unchanged.
class PeerGroup {
 public:
  // Rank r runs on CUDA device devices[r]; several ranks may share a device. INVALID_ARGUMENT: the
  // number of ranks is not allowed (rank_count.h). FAILED_PRECONDITION: a device does not exist, or
  // two devices, both named, cannot map each other's memory.
  static absl::StatusOr<PeerGroup> Create(absl::Span<const int> devices);

  int size() const { return static_cast<int>(devices_.size()); }
  int device(int rank) const { return devices_[static_cast<size_t>(rank)]; }
  // The largest number of ranks that share a device.
  int most_ranks_on_a_device() const;

  // Allocates a buffer on every rank's device and sets every byte to `fill`. RESOURCE_EXHAUSTED: a
  // device does not have so much memory.
  absl::StatusOr<PeerMemory> Allocate(size_t bytes, unsigned char fill) const;

 private:
  explicit PeerGroup(absl::Span<const int> devices) : devices_(devices.begin(), devices.end()) {}
  std::vector<int> devices_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_PEER_GROUP_H_
