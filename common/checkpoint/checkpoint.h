// The weights of a Hugging Face model directory: one safetensors file or many with an index, opened
// and checked as a whole.
#ifndef ISOBIT_COMMON_CHECKPOINT_CHECKPOINT_H_
#define ISOBIT_COMMON_CHECKPOINT_CHECKPOINT_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/readable_file.h"
#include "common/checkpoint/tensor_source.h"

namespace isobit {

// Movable. Open reads the headers once; the files stay open so that tensors can be read.
class Checkpoint final : public TensorSource {
 public:
  // Opens `model.safetensors`, or every shard that `model.safetensors.index.json` names. Symlinks
  // must end inside `root` (empty: inside `directory`). For a Hugging Face cache, whose snapshots
  // link to blobs beside them, pass the cache as `root`. Errors name file and tensor. NOT_FOUND:
  // neither file is there, or a shard is missing. INVALID_ARGUMENT: both files are there;
  // ParseSafetensors fails; a tensor is in two shards, or not in the shard that the index names;
  // the index does not list a tensor.
  static absl::StatusOr<Checkpoint> Open(const std::string& directory,
                                         const std::string& root = "");

  // INVALID_ARGUMENT: a file has become shorter.
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override;
  // INVALID_ARGUMENT: ReadableFile::CheckUnchanged fails for one of the files.
  absl::Status CheckUnchanged() const override;

 private:
  struct Place {
    size_t file;
    uint64_t offset;
  };

  Checkpoint() = default;

  absl::Status AddFile(const std::string& directory, const std::string& name,
                       const std::string& root, std::map<std::string, std::string>& file_of);
  // Puts tensors_ and places_ into the order of the names.
  void SortByName();

  std::vector<ReadableFile> files_;
  std::vector<Place> places_;  // [tensor]
};

// Writes model.safetensors.index.json for shards already in `directory`. `weight_map`: tensor name
// -> file name.
absl::Status WriteSafetensorsIndex(const std::string& directory,
                                   const std::map<std::string, std::string>& weight_map,
                                   uint64_t total_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_CHECKPOINT_H_
