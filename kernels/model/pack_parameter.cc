// The slices of a parameter, converted and stacked.
#include "kernels/model/pack_parameter.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/check.h"

namespace isobit {
namespace {

struct TensorSlice {
  const Tensor* tensor;
  Slice slice;

  int64_t size() const { return slice.rows.size() * slice.columns.size(); }
  int64_t width() const {  // of the tensor
    return static_cast<int64_t>(tensor->NumElements()) / tensor->shape[0];
  }
};

std::vector<TensorSlice> SlicesOf(const Parameter& parameter, const RankShape& rank,
                                  const TensorSet& tensors) {
  std::vector<TensorSlice> slices;
  for (const TensorSpec& spec : parameter.tensors) {
    const Tensor* tensor = tensors.Find(spec.name);
    ISOBIT_CHECK(tensor != nullptr) << spec.name << " is missing among the tensors of a block";
    slices.push_back({tensor, SliceOf(parameter, spec, rank)});
  }
  return slices;
}

// Writes the slice as bf16, row by row; returns where the next one goes.
Bf16* CopySlice(const TensorSlice& from, Bf16* out) {
  const auto [rows, columns] = from.slice;
  const int64_t width = from.width();
  const bool whole_rows = columns.size() == width;
  const int64_t run = whole_rows ? rows.size() * width : columns.size();
  const int64_t end = whole_rows ? rows.begin + 1 : rows.end;
  for (int64_t row = rows.begin; row < end; ++row, out += run) {
    from.tensor->ToBf16(static_cast<size_t>(row * width + columns.begin), static_cast<size_t>(run),
                        out);
  }
  return out;
}

// A matrix of slices of equal width, one below the other, in bf16.
class Stacked {
 public:
  explicit Stacked(const std::vector<TensorSlice>& slices)
      : ld_(slices.front().slice.columns.size()) {
    const TensorSlice& first = slices.front();
    if (slices.size() == 1 && IsReadable(*first.tensor)) {
      ld_ = first.width();
      data_ = reinterpret_cast<const Bf16*>(first.tensor->data) + first.slice.rows.begin * ld_ +
              first.slice.columns.begin;
      return;
    }
    int64_t count = 0;
    for (const TensorSlice& slice : slices) count += slice.size();
    copy_ = std::make_unique_for_overwrite<Bf16[]>(static_cast<size_t>(count));
    data_ = copy_.get();
    Bf16* out = copy_.get();
    for (const TensorSlice& slice : slices) out = CopySlice(slice, out);
  }

  const Bf16* data() const { return data_; }
  int64_t ld() const { return ld_; }  // elements from row to row

 private:
  // Needs neither conversion nor alignment: the packing can read the tensor's own bytes.
  static bool IsReadable(const Tensor& tensor) {
    return tensor.dtype == DType::kBf16 &&
           reinterpret_cast<uintptr_t>(tensor.data) % alignof(Bf16) == 0;
  }

  int64_t ld_;
  std::unique_ptr<Bf16[]> copy_;
  const Bf16* data_ = nullptr;
};

// Writes biases: they are bf16 parameters like any other, but are added in fp32.
void WriteFp32(const std::vector<TensorSlice>& slices, float* out) {
  for (const TensorSlice& slice : slices) {
    const Stacked vector({slice});
    out = std::transform(vector.data(), vector.data() + slice.size(), out,
                         [](Bf16 x) { return contract::Bf16ToFloat(x); });
  }
}

}  // namespace

size_t PackedBytesOf(const Parameter& parameter, const RankShape& rank,
                     const WeightPacker& packer) {
  ISOBIT_CHECK(parameter.scales.empty()) << "no packed form has scales";
  if (parameter.op == ParameterOp::kLinear) return packer.PackedBytes(LinearOf(parameter, rank));
  int64_t count = 0;
  for (const TensorSpec& tensor : parameter.tensors) {
    const Slice slice = SliceOf(parameter, tensor, rank);
    count += slice.rows.size() * slice.columns.size();
  }
  return static_cast<size_t>(count) * ItemSize(parameter.packed);
}

void PackParameter(const Parameter& parameter, const RankShape& rank, const TensorSet& tensors,
                   const WeightPacker& packer, std::byte* out) {
  const std::vector<TensorSlice> slices = SlicesOf(parameter, rank, tensors);
  if (parameter.op == ParameterOp::kLinear) {
    const Stacked matrix(slices);
    packer.Pack(LinearOf(parameter, rank), matrix.data(), matrix.ld(), out);
  } else if (parameter.packed == DType::kF32) {
    WriteFp32(slices, reinterpret_cast<float*>(out));
  } else {
    auto* to = reinterpret_cast<Bf16*>(out);
    for (const TensorSlice& slice : slices) to = CopySlice(slice, to);
  }
}

}  // namespace isobit
