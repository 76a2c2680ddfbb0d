// The cross-rank sum that ends a row-parallel layer, with the norm that always follows it: what a
// backend may fuse. Not here: how the ranks' bytes travel.
#ifndef ISOBIT_KERNELS_ALL_REDUCE_H_
#define ISOBIT_KERNELS_ALL_REDUCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops.h"

namespace isobit {

// The sum of a step that is computed in two halves, 0 and 1, whose sums travel by turns: while
// those of one are on their way, the rank computes the other. For each half Send, then Sum, then
// Receive; calls for the other half may stand between them.
class OverlappedSum {
 public:
  virtual ~OverlappedSum() = default;

  // This rank's partial sums [rows, hidden] fp32 of the half set out to the ranks that add them up.
  // They must stay as they are until Receive's ops have ended.
  virtual absl::Status Send(int half, const float* partial, int64_t rows) = 0;

  // As AllReduce::Norm, for the half's rows; but a rank may take the sum into the residual of its
  // own share of the rows alone, which is the same in every Sum of as many rows. norm.out: memory
  // for the result, which may come to lie elsewhere.
  virtual absl::Status Sum(int half, const RmsNormArgs& norm) = 0;

  // Where the half's rows [rows, hidden] are whole for the ops from here on, until its next Send.
  virtual absl::StatusOr<const Bf16*> Receive(int half) = 0;
};

// One rank's end of the sum. Every rank makes the same calls in the same order, with the same
// shapes.
class AllReduce {
 public:
  virtual ~AllReduce() = default;

  // Whether partial sums come as bf16 instead of fp32 (vanilla over NCCL, as other engines do it).
  virtual bool takes_bf16() const { return false; }

  // For a partial of `rows` rows that the linear layer before the next Norm may send to the ranks
  // itself (LinearArgs::push), in place of storing it; valid until then. Null: it must store it.
  virtual const PartialPush* Push(int64_t /*rows*/) { return nullptr; }

  // norm.residual += bf16(the sum of all ranks' partials + norm.bias), then norm.out =
  // RMSNorm(norm.residual) * norm.weight; norm.sum is unset. partial: [norm.rows, norm.hidden] of
  // this rank, fp32 or bf16 as takes_bf16 says; it must stay as it is until the next call's ops
  // have ended, so a caller alternates between two buffers.
  virtual absl::Status Norm(const void* partial, const RmsNormArgs& norm) = 0;

  // For a step of `rows` rows that is to be computed in two halves; null: better in one piece.
  virtual OverlappedSum* Overlapped(int64_t /*rows*/) { return nullptr; }
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ALL_REDUCE_H_
