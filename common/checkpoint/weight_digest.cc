// The sums over words, with AVX-512 where there is, and the digests made from them.
#include "common/checkpoint/weight_digest.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/base/digest.h"
#include "common/checkpoint/strict_json.h"  // Quoted
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

constexpr size_t kWordValues = 4;
constexpr uint64_t kIndexKey = 0x9e3779b97f4a7c15;
constexpr uint64_t kMix = 0xbf58476d1ce4e5b9;
constexpr uint64_t kLanes[2] = {0x94d049bb133111eb, 0xff51afd7ed558ccd};
// The exponents of a word's values, all ones in those that are not finite, and one in the last
// place of each: their sum reaches a value's sign only from such an exponent.
constexpr uint16_t kExponent = 0x7f80;
constexpr uint64_t kExponents = 0x7f807f807f807f80;
constexpr uint64_t kExponentOnes = 0x0080008000800080;
constexpr uint64_t kSigns = 0x8000800080008000;

// Inlined into each instruction set's function. Every step but the sums is a bijection of the word,
// so that no change of one word goes unseen. Returns whether a value is not finite.
[[gnu::always_inline]] inline bool SumWords(const uint8_t* words, size_t count, uint64_t index,
                                            uint64_t* sums) {
  uint64_t first = 0;
  uint64_t second = 0;
  uint64_t nonfinite = 0;
  const uint64_t key = (index + 1) * kIndexKey;
  for (size_t i = 0; i < count; ++i) {
    uint64_t word;
    std::memcpy(&word, words + i * sizeof(word), sizeof(word));
    nonfinite |= (word & kExponents) + kExponentOnes;
    uint64_t mixed = word ^ (key + i * kIndexKey);
    mixed ^= mixed >> 32;
    mixed *= kMix;
    mixed ^= mixed >> 32;
    const uint64_t a = mixed * kLanes[0];
    const uint64_t b = mixed * kLanes[1];
    first += a ^ (a >> 32);
    second += b ^ (b >> 32);
  }
  sums[0] += first;
  sums[1] += second;
  return (nonfinite & kSigns) != 0;
}

bool SumPortable(const uint8_t* words, size_t count, uint64_t index, uint64_t* sums) {
  return SumWords(words, count, index, sums);
}

using Sum = bool (*)(const uint8_t* words, size_t count, uint64_t index, uint64_t* sums);

#if defined(__x86_64__)

[[gnu::target("avx2")]] bool SumAvx2(const uint8_t* words, size_t count, uint64_t index,
                                     uint64_t* sums) {
  return SumWords(words, count, index, sums);
}

[[gnu::target("avx512f,avx512dq,avx512vl")]] bool SumAvx512(const uint8_t* words, size_t count,
                                                            uint64_t index, uint64_t* sums) {
  return SumWords(words, count, index, sums);
}

Sum ChooseSum() {
  if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) return SumAvx512;
  return __builtin_cpu_supports("avx2") ? SumAvx2 : SumPortable;
}

#else

Sum ChooseSum() { return SumPortable; }

#endif

bool AddWords(const uint8_t* words, size_t count, uint64_t index, uint64_t* sums) {
  static const Sum sum = ChooseSum();
  return sum(words, count, index, sums);
}

}  // namespace

TensorDigester::TensorDigester(const std::vector<int64_t>& shape) {
  // A vector's elements are rows of one value each, so that a shard may begin at any of them.
  row_values_ = shape.size() < 2 ? 1 : static_cast<size_t>(shape.back());
  if (row_values_ % kWordValues == 0) row_values_ = SIZE_MAX;  // no row ends within a word
}

void TensorDigester::Add(DType dtype, const void* values, size_t count) {
  const auto* bytes = static_cast<const uint8_t*>(values);
  if (dtype == DType::kBf16) return AddBf16(bytes, count);
  std::array<uint16_t, 1024> rounded;
  while (count > 0) {
    const size_t now = std::min(count, rounded.size());
    ConvertToBf16(dtype, bytes, now, rounded.data());
    AddBf16(reinterpret_cast<const uint8_t*>(rounded.data()), now);
    bytes += now * ItemSize(dtype);
    count -= now;
  }
}

void TensorDigester::AddBf16(const uint8_t* values, size_t count) {
  while (count > 0) {
    const size_t in_word = in_row_ % kWordValues;
    size_t now = std::min(count, row_values_ - in_row_);
    if (in_word == 0 && now >= kWordValues) {
      const size_t words = now / kWordValues;
      now = words * kWordValues;
      if (AddWords(values, words, index_, sums_.data())) NoteNonfinite(values, now);
      index_ += words;
    } else {
      uint16_t value;
      std::memcpy(&value, values, sizeof(value));
      part_ |= uint64_t{value} << (16 * in_word);
      now = 1;
      if ((value & kExponent) == kExponent) NoteNonfinite(values, now);
      if (in_word + 1 == kWordValues || in_row_ + 1 == row_values_) {
        AddWord(part_);
        part_ = 0;
      }
    }
    values += now * sizeof(uint16_t);
    count -= now;
    num_values_ += now;
    in_row_ += now;
    if (in_row_ == row_values_) in_row_ = 0;
  }
}

void TensorDigester::AddWord(uint64_t word) {
  AddWords(reinterpret_cast<const uint8_t*>(&word), 1, index_++, sums_.data());
}

void TensorDigester::NoteNonfinite(const uint8_t* values, size_t count) {
  for (size_t i = 0; i < count && !first_nonfinite_; ++i) {
    uint16_t value;
    std::memcpy(&value, values + i * sizeof(value), sizeof(value));
    if ((value & kExponent) == kExponent) first_nonfinite_ = num_values_ + i;
  }
}

std::string TensorDigester::Hex() const {
  return absl::StrFormat("%016x%016x", sums_[0], sums_[1]);
}

std::string TensorDigest(const Tensor& tensor) {
  TensorDigester digester(tensor.shape);
  digester.Add(tensor.dtype, tensor.data, tensor.NumElements());
  return digester.Hex();
}

TensorDigests DigestsOfWeights(const TensorDigests& tensors) {
  TensorDigests weights = tensors;
  std::erase_if(weights, [](const auto& tensor) { return IsRotaryBuffer(tensor.first); });
  const auto head = weights.find(kHeadName);
  const auto embedding = weights.find(kEmbeddingName);
  if (head != weights.end() && embedding != weights.end() && head->second == embedding->second) {
    weights.erase(head);
  }
  return weights;
}

std::string WeightDigest(const TensorDigests& tensors) {
  Sha256 hash;
  const auto add = [&hash](const std::string& line) { hash.Update(line.data(), line.size()); };
  add("isobit weights\n");
  for (const auto& [name, tensor] : DigestsOfWeights(tensors)) {
    // The length comes first, so that a name with a line break cannot look like two entries.
    add(absl::StrCat(name.size(), " ", name, " ", ShapeString(tensor.shape), " ", tensor.digest,
                     "\n"));
  }
  return hash.HexFinish();
}

absl::Status NonfiniteError(absl::string_view name, const std::vector<int64_t>& shape,
                            uint64_t place) {
  std::vector<uint64_t> indices(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    const auto extent = static_cast<uint64_t>(shape[i]);
    indices[i] = place % extent;
    place /= extent;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor ", Quoted(name), ": the value at [", absl::StrJoin(indices, ", "),
      "] is a NaN or an infinity in bf16, expected finite weights; --allow_nonfinite_weights "
      "accepts others"));
}

}  // namespace isobit
