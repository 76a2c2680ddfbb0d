// Lays out a rank's weights. See weights.h.
#include "kernels/model/weights.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/model/pack_parameter.h"

namespace isobit {
namespace {

constexpr size_t kAlignment = 128;  // what the GPU's bulk copies of packed weights need
// A parameter's staged values begin at a multiple of so many.
constexpr size_t kStagedValues = 128;

size_t RoundUp(size_t bytes) { return isobit::RoundUp(bytes, kAlignment); }

// Places the parameters one after the other in the order of the operations (ParameterOp), each
// aligned. beside: a layout of these parameters, where all but linear layers stay, and behind which
// these come; or null.
BlockLayout LayOut(const std::vector<Parameter>& parameters, const RankShape& rank,
                   const WeightPacker& packer, const BlockLayout* beside = nullptr) {
  BlockLayout layout;
  if (beside != nullptr) layout.bytes = beside->bytes;
  std::vector<size_t> order;
  for (const Parameter& parameter : parameters) {
    order.push_back(layout.entries.size());
    layout.entries.push_back({.packed = parameter.packed, .offset = 0});
    if (parameter.op == ParameterOp::kLinear) {
      layout.entries.back().linear = LinearOf(parameter, rank);
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return parameters[a].op < parameters[b].op; });
  for (const size_t i : order) {
    if (beside != nullptr && parameters[i].op != ParameterOp::kLinear) {
      layout.entries[i].offset = beside->entries[i].offset;
      continue;
    }
    layout.entries[i].offset = layout.bytes;
    layout.bytes += RoundUp(PackedBytesOf(parameters[i], rank, packer));
  }
  return layout;
}

}  // namespace

void AlignedFree::operator()(std::byte* p) const { std::free(p); }

AlignedBytes AllocateAligned(size_t bytes) {
  const size_t rounded = std::max(kAlignment, RoundUp(bytes));
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  ISOBIT_CHECK(memory != nullptr) << "out of memory: " << rounded << " bytes";
  return AlignedBytes(memory);
}

WeightLayout::WeightLayout(ModelPlan plan, const RankShape& shape, const WeightPacker& packer)
    : plan_(std::move(plan)), shape_(shape), packer_(packer) {
  for (const std::vector<Parameter>& parameters : plan_.parameters) {
    blocks_.push_back(LayOut(parameters, shape_, packer));
  }
}

WeightLayout WeightLayout::WithCopies(const WeightLayout& layout, const WeightPacker& packer) {
  WeightLayout copies(layout.plan_, layout.shape_, packer);
  for (size_t block = 0; block < copies.blocks_.size(); ++block) {
    copies.blocks_[block] =
        LayOut(copies.plan_.parameters[block], copies.shape_, packer, &layout.blocks_[block]);
  }
  return copies;
}

int64_t WeightLayout::WidestGated() const {
  int64_t widest = 0;
  for (const BlockLayout& block : blocks_) {
    for (const BlockLayout::Entry& entry : block.entries) {
      if (entry.linear.gated) widest = std::max(widest, entry.linear.n);
    }
  }
  return widest;
}

std::vector<std::string> WeightLayout::TensorsOf(int block) const {
  std::vector<std::string> names;
  for (const Parameter& parameter : ParametersOf(block)) {
    for (const TensorSpec& tensor : parameter.tensors) names.push_back(tensor.name);
  }
  return names;
}

void WeightLayout::PackBlock(const TensorSet& tensors, int block, std::byte* out) const {
  const std::vector<Parameter>& parameters = ParametersOf(block);
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::byte* const at = out + LayoutOf(block).entries[i].offset;
    const size_t bytes = PackedBytesOf(parameters[i], shape_, packer_);
    // Only a packed linear layer may have bytes that its packer does not write.
    const size_t written = parameters[i].op == ParameterOp::kLinear ? 0 : bytes;
    std::memset(at + written, 0, RoundUp(bytes) - written);
    PackParameter(parameters[i], shape_, tensors, packer_, at);
  }
}

std::vector<StagedSlice> WeightLayout::StagingOf(int block, size_t* num_values) const {
  std::vector<StagedSlice> staging;
  size_t next = 0;
  for (const Parameter& parameter : ParametersOf(block)) {
    next = isobit::RoundUp(next, kStagedValues);
    // A parameter's slices lie one below the other: together they are the matrix to pack.
    for (const TensorSpec& tensor : parameter.tensors) {
      const Slice slice = SliceOf(parameter, tensor, shape_);
      staging.push_back({.tensor = &tensor, .slice = slice, .offset = next});
      next += static_cast<size_t>(slice.rows.size() * slice.columns.size());
    }
  }
  *num_values = next;
  return staging;
}

absl::Status WeightLayout::PackStaged(int block, const Bf16* staged, DevicePacker& packer,
                                      std::byte* out) const {
  const std::vector<Parameter>& parameters = ParametersOf(block);
  size_t num_values = 0;
  const std::vector<StagedSlice> staging = StagingOf(block, &num_values);
  size_t first = 0;  // of the parameter's slices
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const BlockLayout::Entry& entry = LayoutOf(block).entries[i];
    std::byte* const at = out + entry.offset;
    const size_t bytes = PackedBytesOf(parameter, shape_, packer_);
    const Bf16* const from = staged + staging[first].offset;
    first += parameter.tensors.size();
    if (RoundUp(bytes) > bytes) {
      ISOBIT_RETURN_IF_ERROR(packer.FillWithZeros(at + bytes, RoundUp(bytes) - bytes));
    }
    if (parameter.op == ParameterOp::kLinear) {
      ISOBIT_RETURN_IF_ERROR(packer.Pack(entry.linear, packer_, from, at));
    } else if (parameter.packed == DType::kF32) {
      ISOBIT_RETURN_IF_ERROR(packer.Widen(from, static_cast<int64_t>(bytes / sizeof(float)),
                                          reinterpret_cast<float*>(at)));
    } else {
      ISOBIT_RETURN_IF_ERROR(packer.Copy(at, from, bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit
