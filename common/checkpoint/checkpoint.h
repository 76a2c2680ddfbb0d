// The weights of a Hugging Face model directory: one safetensors file or many with an index, mapped
// and checked as a whole.
#ifndef ISOBIT_COMMON_CHECKPOINT_CHECKPOINT_H_
#define ISOBIT_COMMON_CHECKPOINT_CHECKPOINT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/mapped_file.h"
#include "common/checkpoint/safetensors.h"

namespace isobit {

// Movable. The tensors point into file maps that the checkpoint owns. Reads are thread safe.
class Checkpoint {
 public:
  // Opens `model.safetensors`, or every shard that `model.safetensors.index.json` names. Files may
  // be symlinks that end inside `root` (empty: inside `directory`); for a Hugging Face cache, whose
  // snapshots link to blobs beside them, pass the cache as `root`. Errors, naming file and tensor:
  // NOT_FOUND when neither file is there or a shard is missing; INVALID_ARGUMENT when both are
  // there, for all that ParseSafetensors rejects, a tensor in two shards, one that the index places
  // in a shard without it, or one that the index does not list.
  static absl::StatusOr<Checkpoint> Open(const std::string& directory,
                                         const std::string& root = "");

  // Of tensors that live elsewhere, and outlive it, or that generate their elements.
  static Checkpoint Of(std::vector<Tensor> tensors);

  // Sorted by name.
  const std::vector<Tensor>& tensors() const { return tensors_; }

  // Null when there is no tensor of that name.
  const Tensor* Find(absl::string_view name) const;

 private:
  Checkpoint() = default;

  absl::Status AddFile(const std::string& directory, const std::string& name,
                       const std::string& root, std::map<std::string, std::string>& file_of);

  std::vector<MappedFile> files_;
  std::vector<Tensor> tensors_;
};

struct CheckpointDigests {
  std::map<std::string, std::string> tensors;  // name -> TensorDigest
  std::string checkpoint;  // SHA-256 of the sorted names and digests: independent of the sharding
};

// Reads every byte of the checkpoint, on all cores.
CheckpointDigests DigestCheckpoint(const Checkpoint& checkpoint);

// Writes model.safetensors.index.json for shards already in `directory`. `weight_map`: tensor name
// -> file name.
absl::Status WriteSafetensorsIndex(const std::string& directory,
                                   const std::map<std::string, std::string>& weight_map,
                                   uint64_t total_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_CHECKPOINT_H_
