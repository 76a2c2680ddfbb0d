// Reading in chunks whose digest is taken while they are in the cache. See weight_reader.h.
#include "common/checkpoint/weight_reader.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/parallel_for.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

constexpr size_t kChunkBytes = 256 << 10;  // a multiple of every element's size; fits the L2 cache
constexpr size_t kAlignment = 64;          // of each tensor in a set

constexpr char kNotHashed[] = "read";  // in the place of a digest

// Memory in huge pages as far as they fit: gigabytes of small pages take longer to map than to
// fill. Null: no memory.
std::unique_ptr<uint8_t[]> Allocate(size_t bytes) {
  constexpr uintptr_t kHugePage = 2 << 20;
  std::unique_ptr<uint8_t[]> memory(new (std::nothrow) uint8_t[bytes]);
  if (memory == nullptr) return memory;
  const auto at = reinterpret_cast<uintptr_t>(memory.get());
  const uintptr_t begin = (at + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (at + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(memory.get() + (begin - at), end - begin, MADV_HUGEPAGE);
  return memory;
}

}  // namespace

WeightReader::WeightReader(const TensorSource& source, bool allow_nonfinite)
    : source_(source),
      hashes_(source.known_digest().empty()),
      allow_nonfinite_(allow_nonfinite),
      digests_(source.tensors().size()) {}

absl::Status WeightReader::Read(const std::vector<std::string>& names, size_t max_workers,
                                TensorSet& out) {
  std::vector<size_t> wanted;  // indices of tensors, ascending and thereby sorted by name
  for (const std::string& name : names) {
    const Tensor* tensor = source_.Find(name);
    ISOBIT_CHECK(tensor != nullptr) << "there is no tensor " << name;
    wanted.push_back(static_cast<size_t>(tensor - source_.tensors().data()));
  }
  std::sort(wanted.begin(), wanted.end());
  std::vector<size_t> offsets;
  size_t bytes = 0;
  out.tensors_.clear();
  for (const size_t tensor : wanted) {
    out.tensors_.push_back(source_.tensors()[tensor]);
    offsets.push_back(bytes);
    bytes += (out.tensors_.back().size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (out.capacity_ < bytes) {
    out.memory_.reset();  // before the new one is there
    out.memory_ = Allocate(bytes);
    out.capacity_ = out.memory_ == nullptr ? 0 : bytes;
    if (out.capacity_ == 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no host memory for ", bytes, " bytes of weights"));
    }
  }
  std::vector<size_t> largest_first(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    largest_first[i] = i;
    out.tensors_[i].data = out.memory_.get() + offsets[i];
  }
  std::stable_sort(largest_first.begin(), largest_first.end(), [&](size_t a, size_t b) {
    return out.tensors_[a].size_bytes > out.tensors_[b].size_bytes;
  });
  return ParallelFor(wanted.size(), max_workers, [&](size_t item, size_t /*worker*/) {
    const size_t i = largest_first[item];
    return ReadTensor(wanted[i], out.memory_.get() + offsets[i]);
  });
}

absl::Status WeightReader::ReadTensor(size_t index, uint8_t* out) {
  ISOBIT_CHECK(digests_[index].empty()) << source_.tensors()[index].name << " was read before";
  const Tensor& tensor = source_.tensors()[index];
  const bool keep = out != nullptr;
  const std::unique_ptr<uint8_t[]> window =
      keep ? nullptr : Allocate(std::min(kChunkBytes, tensor.size_bytes));
  if (!keep) out = window.get();
  if (out == nullptr) return absl::ResourceExhaustedError("no host memory to read weights");
  TensorDigester digester(tensor.shape);
  for (size_t first = 0; first < tensor.size_bytes; first += kChunkBytes) {
    const size_t size = std::min(kChunkBytes, tensor.size_bytes - first);
    uint8_t* chunk = keep ? out + first : out;
    ISOBIT_RETURN_IF_ERROR(source_.Read(index, first, size, chunk));
    if (hashes_) digester.Add(tensor.dtype, chunk, size / ItemSize(tensor.dtype));
    if (digester.first_nonfinite() && !allow_nonfinite_ && !IsRotaryBuffer(tensor.name)) {
      return NonfiniteError(tensor.name, tensor.shape, *digester.first_nonfinite());
    }
  }
  digests_[index] = hashes_ ? digester.Hex() : kNotHashed;
  return absl::OkStatus();
}

absl::StatusOr<CheckpointDigests> WeightReader::Finish() {
  CheckpointDigests digests;
  digests.checkpoint = source_.known_digest();
  if (!hashes_) return digests;
  std::vector<size_t> left;
  for (size_t tensor = 0; tensor < digests_.size(); ++tensor) {
    if (digests_[tensor].empty()) left.push_back(tensor);
  }
  // The largest tensors first, so that the last thread to finish has a small one.
  std::stable_sort(left.begin(), left.end(), [&](size_t a, size_t b) {
    return source_.tensors()[a].size_bytes > source_.tensors()[b].size_bytes;
  });
  ISOBIT_RETURN_IF_ERROR(ParallelFor(left.size(), left.size(), [&](size_t item, size_t /*worker*/) {
    return ReadTensor(left[item], nullptr);
  }));
  ISOBIT_RETURN_IF_ERROR(source_.CheckUnchanged());
  for (size_t i = 0; i < digests_.size(); ++i) {
    const Tensor& tensor = source_.tensors()[i];
    digests.tensors.emplace(tensor.name, ShapedDigest{tensor.shape, std::move(digests_[i])});
  }
  digests.checkpoint = WeightDigest(digests.tensors);
  return digests;
}

absl::StatusOr<CheckpointDigests> DigestTensors(const TensorSource& source, bool allow_nonfinite) {
  return WeightReader(source, allow_nonfinite).Finish();
}

}  // namespace isobit
