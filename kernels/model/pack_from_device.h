// Packs a model from tensors in GPU memory, on the GPUs: what PackModel does by way of the host.
// Each rank fetches only the rows and columns that it needs, and nobody holds a whole model beside
// it.
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
#include "kernels/device_packer.h"
#include "kernels/model/rank_shape.h"
#include "kernels/model/weight_store.h"

namespace isobit {

// A slice of a tensor, and where a rank wants it.
struct WantedSlice {
  size_t tensor = 0;  // its number in the list
  Slice slice;
  Bf16* to = nullptr;  // in the device's memory, without gaps
};

// Brings slices to one rank, rounded to bf16, job by job.
class SliceSource {
 public:
  virtual ~SliceSource() = default;
  // Called once, before the first job: the slices of all, whose `to` is not set.
  virtual absl::Status Plan(absl::Span<const absl::Span<const WantedSlice>> /*jobs*/) {
    return absl::OkStatus();
  }
  // Enqueues the next job with `packer`'s work.
  virtual absl::Status Fetch(absl::Span<const WantedSlice> slices, DevicePacker& packer) = 0;
  // Called once, at the end, or after an error that ends the packing: `packed`. OK only if the
  // slices that came are worth something.
  virtual absl::Status End(const absl::Status& packed) { return packed; }
};

// How a tensor's values are stored, for DevicePacker::Round.
StoredAs StoredAsOf(DType dtype);

// By the number of the tensor.
std::vector<std::vector<const WeightBlock*>> BlocksOfTensors(const std::vector<Tensor>& tensors,
                                                             const WeightBlocks& blocks);

// What of a slice a block holds; empty intervals if it holds nothing.
Slice CommonPart(const Slice& slice, const WeightBlock& block);

// Reads blocks in other processes' memory, by the handles of `blocks`, which
// DevicePacker::MapForeign maps as they are needed: a rank needs few of them. `blocks` holds the
// tensors, as ValidateBlocks has accepted, and outlives the source, like `tensors`. Errors of
// Fetch: MapForeign's; INVALID_ARGUMENT, naming the tensor: a block that does not lie within its
// memory. INVARIANT: a rank maps a memory once, and only one that it reads
// (ReadBlocksTest.ARankMapsOnlyWhatItReads).
std::unique_ptr<SliceSource> ReadBlocks(const std::vector<Tensor>& tensors,
                                        const WeightBlocks& blocks);

// Packs the weights `tensors`, which ValidateTensors has accepted, into `store`, one thread for
// each rank, and returns their digest, 64 hex digits. make_source: of one rank, on
// the rank's thread; the source is destroyed before the packer. check: called between blocks; an
// error ends the packing. Staged tensors and a packed block take device memory: about two of the
// largest block. Errors: those of the arguments, of the store, and of CheckDigests;
// RESOURCE_EXHAUSTED: no memory; UNIMPLEMENTED: the store's ranks compute in host memory. Unless
// `allow_nonfinite`, weights must be finite in bf16: NonfiniteError. After an error, drop what was
// packed. INVARIANT: the digest is that of the packed bytes, which are
// PackModel's (PackFromDeviceTest.*).
absl::StatusOr<std::string> PackFromDevice(
    const std::vector<Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<SliceSource>>(size_t rank, size_t num_ranks,
                                                                   DevicePacker&)>
        make_source,
    absl::FunctionRef<absl::Status()> check, WeightStore& store, bool allow_nonfinite = false);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PACK_FROM_DEVICE_H_
