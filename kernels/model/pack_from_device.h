// Packs a model on the GPUs from tensors in GPU memory, as PackModel
// does by way of the host. Each rank fetches only the rows and
// columns that it needs, so the whole model is never copied at once.
#ifndef ISOBIT_KERNELS_MODEL_PACK_FROM_DEVICE_H_
#define ISOBIT_KERNELS_MODEL_PACK_FROM_DEVICE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/weight_blocks.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/device_packer.h"
#include "kernels/model/weight_store.h"

namespace isobit {

// A slice of a tensor, and the memory where a rank wants it.
struct WantedSlice {
  size_t tensor = 0;  // its number in the list
  Slice slice;
  Bf16* to = nullptr;  // in the device's memory, rows without gaps
};

// Copies slices to one rank, rounded to bf16, job by job.
class SliceSource {
 public:
  virtual ~SliceSource() = default;
  // Called once, before the first job, with the slices of all jobs; their `to` is not set.
  virtual absl::Status Plan(absl::Span<const absl::Span<const WantedSlice>> /*jobs*/) {
    return absl::OkStatus();
  }
  // Enqueues the next job together with `packer`'s work.
  virtual absl::Status Fetch(absl::Span<const WantedSlice> slices, DevicePacker& packer) = 0;
  // Called once at the end with `packed`, or with the error that ends the packing. OK only if the
  // slices that came are usable.
  virtual absl::Status End(const absl::Status& packed) { return packed; }
};

// How a tensor's values are stored, for DevicePacker::Round.
StoredAs StoredAsOf(DType dtype);

// The blocks of each tensor, by the tensor's number.
std::vector<std::vector<const WeightBlock*>> BlocksOfTensors(const std::vector<Tensor>& tensors,
                                                             const WeightBlocks& blocks);

// The part of a slice that a block holds; empty intervals if there is none.
Slice CommonPart(const Slice& slice, const WeightBlock& block);

// Reads blocks in other processes' memory, by the handles of `blocks`.
// DevicePacker::MapForeign maps a memory when it is first needed: a rank needs
// few of them. ValidateBlocks has accepted `tensors` and `blocks`; both outlive
// the source. Errors of Fetch: those of MapForeign; INVALID_ARGUMENT, naming the
// tensor: a block does not lie within its memory. INVARIANT: a rank maps a memory
// only once, and only if it reads it (ReadBlocksTest.ARankMapsOnlyWhatItReads).
std::unique_ptr<SliceSource> ReadBlocks(const std::vector<Tensor>& tensors,
                                        const WeightBlocks& blocks);

// Packs the weights `tensors`, which ValidateTensors has accepted, into `store`, with one thread
// per rank, and returns their digest, 64 hex digits. make_source: makes a rank's source, on the
// rank's thread; the source is destroyed before the packer. check: called between blocks; an error
// from it ends the packing. Copied tensors and a packed block take device memory, about twice that
// of the largest block. Errors: those of the callbacks, of the store and of CheckDigests;
// RESOURCE_EXHAUSTED: there is no memory; UNIMPLEMENTED: the store's ranks compute in host memory;
// NonfiniteError: a weight is not finite in bf16, unless `allow_nonfinite`. After an error, drop
// what was packed. INVARIANT: the digest is that of the packed bytes, which are PackModel's
// (PackFromDeviceTest.*).
absl::StatusOr<std::string> PackFromDevice(
    const std::vector<Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<SliceSource>>(size_t rank, size_t num_ranks,
                                                                   DevicePacker&)>
        make_source,
    absl::FunctionRef<absl::Status()> check, WeightStore& store, bool allow_nonfinite = false);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PACK_FROM_DEVICE_H_
