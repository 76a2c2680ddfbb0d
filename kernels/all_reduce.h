// The sum over ranks that ends a row-parallel layer, together with the norm that always follows, so
// that a backend may fuse the two. Not here: how the ranks exchange bytes.
#ifndef ISOBIT_KERNELS_ALL_REDUCE_H_
#define ISOBIT_KERNELS_ALL_REDUCE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/rms_norm.h"

namespace isobit {

// The sums of a step that is computed in two halves, 0 and 1: while the sums of one half travel,
// the rank computes the other (micro-batch overlap). For each half call Send, then Sum, then
// Receive; calls for the other half may come between them.
class OverlappedSum {
 public:
  virtual ~OverlappedSum() = default;

  // Sends this rank's partial sums of the half, [rows, hidden] fp32, to the ranks that add them.
  // They must not change until Receive's ops have ended.
  virtual absl::Status Send(int half, const float* partial, int64_t rows) = 0;

  // As AllReduce::Norm, for the half's rows. A rank may add the sum to the residual of only its own
  // share of the rows; that share depends only on the number of rows. norm.out: memory for the
  // result, which Receive may nevertheless return elsewhere.
  virtual absl::Status Sum(int half, const RmsNormArgs& norm) = 0;

  // Returns the normalised rows of the half, [rows, hidden], complete for ops that are launched
  // from now on. They are valid until the half's next Send.
  virtual absl::StatusOr<const Bf16*> Receive(int half) = 0;
};

// One rank's end of the sum. Every rank makes the same calls in the same order, with the same
// shapes.
class AllReduce {
 public:
  virtual ~AllReduce() = default;

  // Whether partial sums come as bf16 instead of fp32 (vanilla over NCCL, as other engines do it).
  virtual bool takes_bf16() const { return false; }

  // Lets the linear layer before the next Norm send its partial sums of `rows` rows to the ranks
  // itself (LinearArgs::push) instead of storing them. Valid until that Norm. Null: the layer must
  // store them.
  virtual const PartialPush* Push(int64_t /*rows*/) { return nullptr; }

  // norm.residual += bf16(the sum of all ranks' partials + norm.bias), then norm.out =
  // RMSNorm(norm.residual) * norm.weight; norm.sum is unset. partial: [norm.rows, norm.hidden] of
  // this rank, fp32 or bf16 as takes_bf16 says. It must not change until the next call's ops have
  // ended, so a caller alternates between two buffers.
  virtual absl::Status Norm(const void* partial, const RmsNormArgs& norm) = 0;

  // For a step of `rows` rows that should be computed in two halves. Null: the step is faster
  // undivided.
  virtual OverlappedSum* Overlapped(int64_t /*rows*/) { return nullptr; }
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_ALL_REDUCE_H_
