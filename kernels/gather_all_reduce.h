// The sum over ranks that can read each other's partial sums in place, in host or GPU memory. Their
// threads wait for each other; then each rank adds all partial sums with its own ops.
#ifndef ISOBIT_KERNELS_GATHER_ALL_REDUCE_H_
#define ISOBIT_KERNELS_GATHER_ALL_REDUCE_H_

#include <cstdint>
#include <limits>

#include "common/parallel/communicator.h"
#include "kernels/all_reduce.h"
#include "kernels/backend.h"

namespace isobit {

class GatherAllReduce final : public AllReduce, private OverlappedSum {
 public:
  // `ops` and `comm` outlive the object; comm's Gather must not copy. Steps of at least
  // overlap_rows rows are computed in halves. That saves no time here, but tests the order of the
  // caller's calls.
  explicit GatherAllReduce(Backend& ops, Communicator& comm,
                           int64_t overlap_rows = std::numeric_limits<int64_t>::max())
      : ops_(ops), comm_(comm), overlap_rows_(overlap_rows) {}

  absl::Status Norm(const void* partial, const RmsNormArgs& norm) override;
  OverlappedSum* Overlapped(int64_t rows) override {
    return rows >= overlap_rows_ ? this : nullptr;
  }

 private:
  absl::Status Send(int half, const float* partial, int64_t rows) override;
  absl::Status Sum(int half, const RmsNormArgs& norm) override;
  absl::StatusOr<const Bf16*> Receive(int half) override { return rows_[half]; }

  Backend& ops_;
  Communicator& comm_;
  const int64_t overlap_rows_;
  const float* sent_[2] = {};  // partial sums of a half, until they are added
  const Bf16* rows_[2] = {};   // their normalised sums
  Memory sum_;                 // [rows, hidden] fp32; grows, never shrinks
  size_t sum_bytes_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_GATHER_ALL_REDUCE_H_
