// One rank's end of an NCCL communicator: collectives on GPU memory, between GPUs of one process,
// one host or several hosts. Not here: how ranks learn the group's id, or where their bytes come
// from.
#ifndef ISOBIT_COMMON_PARALLEL_NCCL_GROUP_H_
#define ISOBIT_COMMON_PARALLEL_NCCL_GROUP_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct ncclComm;
struct CUstream_st;  // what a cudaStream_t points to

namespace isobit {

struct NcclOptions {
  std::string id;  // NewNcclId's, the same on all ranks
  int rank = 0;
  int size = 1;
  int device = 0;                              // CUDA ordinal; ranks of one process differ
  std::chrono::milliseconds timeout{120'000};  // of every wait for other ranks
};

// Makes the id of a new group: 128 bytes. One rank makes it, and all ranks pass it to
// NcclGroup::Create while that rank's process lives.
absl::StatusOr<std::string> NewNcclId();

// GPU memory that all ranks allocate together. If GPUs have peer access, NCCL lets ranks write into
// each other's memory.
using NcclMemory = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

// All ranks make the same calls in the same order, each from one thread at a time. Calls enqueue on
// a stream and do not wait, unless they say so. After Abort, every call returns its reason. A rank
// that waits for a stream must poll Check meanwhile: if a peer has gone, its collective ends only
// by Abort.
class NcclGroup {
 public:
  // Waits for all ranks. DEADLINE_EXCEEDED: not all came in time. UNAVAILABLE: a peer or the
  // network failed. FAILED_PRECONDITION: the device does not exist. INTERNAL: CUDA or NCCL failed.
  static absl::StatusOr<std::unique_ptr<NcclGroup>> Create(const NcclOptions& options);
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  // The group's memory may outlive it.
  ~NcclGroup();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  int device() const { return options_.device; }

  // Allocates memory of the same size, at least 1 byte, on every rank, and waits for all ranks.
  // With peer access, an AllGather within such memory takes no multiprocessor from kernels that run
  // at the same time. RESOURCE_EXHAUSTED: there is no memory.
  absl::StatusOr<NcclMemory> Allocate(size_t bytes);

  // receive[r * bytes, (r + 1) * bytes) = rank r's send[0, bytes), on every rank. `send` may be
  // this rank's slice of `receive`.
  absl::Status AllGather(const void* send, void* receive, size_t bytes, CUstream_st* stream);

  // Any other collective: `call` enqueues it on a stream of the group's device and returns NCCL's
  // result. what: its name for errors, for instance the function's.
  absl::Status Run(const char* what, absl::FunctionRef<int(ncclComm*)> call);

  // The first error of a collective in flight. Any thread may call it.
  absl::Status Check();

  // Ends the group here and, as far as NCCL can, what this rank has in flight. Any thread may call
  // it; `reason` is an error.
  void Abort(const absl::Status& reason);

 private:
  struct Shared;

  NcclGroup(const NcclOptions& options, std::shared_ptr<Shared> shared)
      : options_(options), shared_(std::move(shared)) {}

  const NcclOptions options_;
  // Calls that timed out own it, too, since they still use the communicator.
  const std::shared_ptr<Shared> shared_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_NCCL_GROUP_H_
