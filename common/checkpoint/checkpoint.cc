// Joins the shards of a checkpoint and checks them against the index.
#include "common/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/atomic_file.h"
#include "common/checkpoint/model_directory.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/strict_json.h"

namespace isobit {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = 64 << 20;
constexpr size_t kMaxShards = 4096;

bool Exists(const std::string& directory, const char* name) {
  std::error_code error;
  // A dangling symlink counts as present: opening it then reports what is wrong.
  return std::filesystem::symlink_status(std::filesystem::path(directory) / name, error).type() !=
         std::filesystem::file_type::not_found;
}

// Tensor name -> shard file name.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& directory,
                                                             const std::string& root) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string path, ResolveFileInside(directory, kIndexFile, root));
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxIndexBytes));
  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json index, ParseJsonObject(text, kIndexFile));
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end() || !weight_map->is_object() || weight_map->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kIndexFile, ": weight_map must be a non-empty object"));
  }
  std::map<std::string, std::string> shard_of;
  for (const auto& [tensor, shard] : weight_map->items()) {
    if (!shard.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(kIndexFile, ": the shard of tensor ",
                                                     Quoted(tensor), " must be a file name"));
    }
    shard_of[tensor] = shard.get<std::string>();
  }
  return shard_of;
}

absl::Status CheckAgainstIndex(const std::map<std::string, std::string>& shard_of,
                               const std::map<std::string, std::string>& file_of) {
  for (const auto& [tensor, shard] : shard_of) {
    const auto found = file_of.find(tensor);
    if (found == file_of.end() || found->second != shard) {
      return absl::InvalidArgumentError(absl::StrCat(kIndexFile, ": tensor ", Quoted(tensor),
                                                     " is missing in its shard ", Quoted(shard)));
    }
  }
  for (const auto& [tensor, file] : file_of) {
    if (shard_of.count(tensor) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(kIndexFile, ": tensor ", Quoted(tensor),
                                                     " of shard ", Quoted(file), " is not listed"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Checkpoint::AddFile(const std::string& directory, const std::string& name,
                                 const std::string& root,
                                 std::map<std::string, std::string>& file_of) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string path, ResolveFileInside(directory, name, root));
  ISOBIT_ASSIGN_OR_RETURN(ReadableFile file, ReadableFile::Open(path, name));
  ISOBIT_ASSIGN_OR_RETURN(const std::string head, ReadSafetensorsHead(file, name));
  ISOBIT_ASSIGN_OR_RETURN(std::vector<StoredTensor> tensors,
                          ParseSafetensors(head, file.size(), name));
  for (auto& [tensor, offset] : tensors) {
    const auto [where, added] = file_of.emplace(tensor.name, name);
    if (!added) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": tensor ", Quoted(tensor.name), " is also in ", where->second));
    }
    tensors_.push_back(std::move(tensor));
    places_.push_back({files_.size(), offset});
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& directory, const std::string& root) {
  const bool single = Exists(directory, kSingleFile);
  const bool sharded = Exists(directory, kIndexFile);
  if (!single && !sharded) {
    return absl::NotFoundError(
        absl::StrCat(directory, " has neither ", kSingleFile, " nor ", kIndexFile));
  }
  if (single && sharded) {
    return absl::InvalidArgumentError(absl::StrCat(directory, " has both ", kSingleFile, " and ",
                                                   kIndexFile, ": which one counts is unclear"));
  }
  Checkpoint checkpoint;
  std::map<std::string, std::string> file_of;
  if (single) {
    ISOBIT_RETURN_IF_ERROR(checkpoint.AddFile(directory, kSingleFile, root, file_of));
  } else {
    ISOBIT_ASSIGN_OR_RETURN(const auto shard_of, ReadIndex(directory, root));
    std::set<std::string> shards;
    for (const auto& [tensor, shard] : shard_of) shards.insert(shard);
    if (shards.size() > kMaxShards) {
      return absl::InvalidArgumentError(
          absl::StrCat(kIndexFile, ": ", shards.size(), " shards, limit ", kMaxShards));
    }
    for (const std::string& shard : shards) {
      ISOBIT_RETURN_IF_ERROR(checkpoint.AddFile(directory, shard, root, file_of));
    }
    ISOBIT_RETURN_IF_ERROR(CheckAgainstIndex(shard_of, file_of));
  }
  checkpoint.SortByName();
  return checkpoint;
}

void Checkpoint::SortByName() {
  std::vector<size_t> order(tensors_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return tensors_[a].name < tensors_[b].name; });
  std::vector<Tensor> tensors;
  std::vector<Place> places;
  for (const size_t i : order) {
    tensors.push_back(std::move(tensors_[i]));
    places.push_back(places_[i]);
  }
  tensors_ = std::move(tensors);
  places_ = std::move(places);
}

absl::Status Checkpoint::Read(size_t tensor, size_t first, size_t size, uint8_t* out) const {
  const Place& place = places_[tensor];
  const absl::Status read = files_[place.file].ReadAt(place.offset + first, size, out);
  if (read.ok()) return read;
  return absl::Status(read.code(),
                      absl::StrCat("tensor ", Quoted(tensors_[tensor].name), ": ", read.message()));
}

absl::Status Checkpoint::CheckUnchanged() const {
  for (const ReadableFile& file : files_) ISOBIT_RETURN_IF_ERROR(file.CheckUnchanged());
  return absl::OkStatus();
}

absl::Status WriteSafetensorsIndex(const std::string& directory,
                                   const std::map<std::string, std::string>& weight_map,
                                   uint64_t total_bytes) {
  const nlohmann::json index = {{"metadata", {{"total_size", total_bytes}}},
                                {"weight_map", weight_map}};
  const std::string text =
      index.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  return WriteFileAtomically((std::filesystem::path(directory) / kIndexFile).string(), {text});
}

}  // namespace isobit
