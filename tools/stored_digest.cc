// SHA-256 over names, dtypes, shapes and bytes.
#include "tools/stored_digest.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/digest.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr size_t kChunkBytes = 1 << 20;  // a multiple of every element's size

void Add(const std::string& text, Sha256& hash) { hash.Update(text.data(), text.size()); }

}  // namespace

absl::StatusOr<std::string> StoredDigest(const TensorSource& source) {
  std::vector<uint8_t> chunk(kChunkBytes);
  Sha256 whole;
  for (size_t t = 0; t < source.tensors().size(); ++t) {
    const Tensor& tensor = source.tensors()[t];
    Sha256 hash;
    Add(absl::StrCat(SafetensorsName(tensor.dtype), " ", ShapeString(tensor.shape), "\n"), hash);
    for (size_t first = 0; first < tensor.size_bytes; first += kChunkBytes) {
      const size_t size = std::min(kChunkBytes, tensor.size_bytes - first);
      ISOBIT_RETURN_IF_ERROR(source.Read(t, first, size, chunk.data()));
      hash.Update(chunk.data(), size);
    }
    Add(absl::StrCat(tensor.name.size(), " ", tensor.name, " ", hash.HexFinish(), "\n"), whole);
  }
  return whole.HexFinish();
}

}  // namespace isobit
