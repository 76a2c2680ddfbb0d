// Lays out, cuts and packs a rank's weights. See weights.h.
#include "kernels/model/weights.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

constexpr size_t kAlignment = 128;  // what the GPU's bulk copies of packed weights need

// Hands out consecutive aligned places.
class Placer {
 public:
  size_t Place(size_t bytes) {
    const size_t at = next_;
    next_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  size_t end() const { return next_; }

 private:
  size_t next_ = 0;
};

const Tensor& Get(const TensorSet& tensors, const std::string& name) {
  const Tensor* tensor = tensors.Find(name);
  ISOBIT_CHECK(tensor != nullptr) << name << " is missing among the tensors of a block";
  return *tensor;
}

// The part [rows, columns) of a matrix; a vector is a matrix of one column.
struct Part {
  const Tensor* tensor;
  Interval rows;
  Interval columns;
};

int64_t WidthOf(const Tensor& tensor) {
  return static_cast<int64_t>(tensor.NumElements()) / tensor.shape[0];
}

Part RowsOf(const Tensor& tensor, const Interval& rows) {
  return {&tensor, rows, {0, WidthOf(tensor)}};
}

Part ColumnsOf(const Tensor& tensor, const Interval& columns) {
  return {&tensor, {0, tensor.shape[0]}, columns};
}

// Parts of equal width below each other, in bf16.
class Stacked {
 public:
  explicit Stacked(const std::vector<Part>& parts) : ld_(parts.front().columns.size()) {
    const Part& first = parts.front();
    if (parts.size() == 1 && IsReadable(*first.tensor)) {
      ld_ = WidthOf(*first.tensor);
      data_ = reinterpret_cast<const Bf16*>(first.tensor->data) + first.rows.begin * ld_ +
              first.columns.begin;
      return;
    }
    int64_t num_rows = 0;
    for (const Part& part : parts) num_rows += part.rows.size();
    copy_ = std::make_unique_for_overwrite<Bf16[]>(static_cast<size_t>(num_rows * ld_));
    data_ = copy_.get();
    Bf16* out = copy_.get();
    for (const Part& part : parts) out = CopyPart(part, out);
  }

  const Bf16* data() const { return data_; }
  int64_t ld() const { return ld_; }  // elements from row to row

 private:
  // Needs neither conversion nor alignment: the packing can read the tensor's own bytes.
  static bool IsReadable(const Tensor& tensor) {
    return tensor.dtype == DType::kBf16 &&
           reinterpret_cast<uintptr_t>(tensor.data) % alignof(Bf16) == 0;
  }

  static Bf16* CopyPart(const Part& part, Bf16* out) {
    const int64_t width = WidthOf(*part.tensor);
    const bool whole_rows = part.columns.size() == width;
    const int64_t run = whole_rows ? part.rows.size() * width : part.columns.size();
    const int64_t end = whole_rows ? part.rows.begin + 1 : part.rows.end;
    for (int64_t row = part.rows.begin; row < end; ++row, out += run) {
      part.tensor->ToBf16(static_cast<size_t>(row * width + part.columns.begin),
                          static_cast<size_t>(run), out);
    }
    return out;
  }

  int64_t ld_;
  std::unique_ptr<Bf16[]> copy_;
  const Bf16* data_ = nullptr;
};

void CopyBf16(const Tensor& tensor, std::byte* out) { tensor.ToBf16(reinterpret_cast<Bf16*>(out)); }

// A bias is a bf16 parameter like any other, added in fp32.
void CopyBias(const std::vector<Part>& parts, std::byte* out) {
  for (const Part& part : parts) {
    const Stacked bias({part});
    std::transform(bias.data(), bias.data() + part.rows.size(), reinterpret_cast<float*>(out),
                   [](Bf16 x) { return contract::Bf16ToFloat(x); });
    out += static_cast<size_t>(part.rows.size()) * sizeof(float);
  }
}

void PackParts(const LinearShape& shape, const std::vector<Part>& parts, const Ops& ops,
               std::byte* out) {
  const Stacked matrix(parts);
  ops.Pack(shape, matrix.data(), matrix.ld(), out);
}

Interval Scale(const Interval& interval, int64_t factor) {
  return {interval.begin * factor, interval.end * factor};
}

}  // namespace

void AlignedFree::operator()(std::byte* p) const { std::free(p); }

AlignedBytes AllocateAligned(size_t bytes) {
  const size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  ISOBIT_CHECK(memory != nullptr) << "out of memory: " << rounded << " bytes";
  return AlignedBytes(memory);
}

WeightLayout::WeightLayout(const ModelConfig& config, const RankShape& shape, const Ops& ops)
    : config_(config), shape_(shape) {
  const size_t hidden = static_cast<size_t>(config.hidden_size);
  const size_t head_norm = config.qk_norm ? static_cast<size_t>(config.head_dim) : 0;
  const auto bias = [](bool has, int64_t n) {
    return has ? static_cast<size_t>(n) * sizeof(float) : 0;
  };
  Placer placer;
  layer_.input_norm = placer.Place(hidden * sizeof(Bf16));
  layer_.post_norm = placer.Place(hidden * sizeof(Bf16));
  layer_.q_norm = placer.Place(head_norm * sizeof(Bf16));
  layer_.k_norm = placer.Place(head_norm * sizeof(Bf16));
  layer_.qkv = placer.Place(ops.PackedBytes(shape.qkv));
  layer_.o = placer.Place(ops.PackedBytes(shape.o));
  layer_.gate_up = placer.Place(ops.PackedBytes(shape.gate_up));
  layer_.down = placer.Place(ops.PackedBytes(shape.down));
  layer_.qkv_bias = placer.Place(bias(config.qkv_bias, shape.qkv.n));
  layer_.o_bias = placer.Place(bias(config.o_bias, shape.o.n));
  layer_.gate_up_bias = placer.Place(bias(config.mlp_bias, shape.gate_up.n));
  layer_.down_bias = placer.Place(bias(config.mlp_bias, shape.down.n));
  layer_.end = placer.end();

  Placer head;
  head.Place(hidden * sizeof(Bf16));
  head_weight_ = head.Place(ops.PackedBytes(shape.head));
  head_end_ = head.end();
}

size_t WeightLayout::BlockBytes(int block) const {
  if (block == 0)
    return static_cast<size_t>(config_.vocab_size) * static_cast<size_t>(config_.hidden_size) *
           sizeof(Bf16);
  return block == head_block() ? head_end_ : layer_.end;
}

LayerWeights WeightLayout::BindLayer(const std::byte* block) const {
  const auto bf16 = [block](bool has, size_t at) {
    return has ? reinterpret_cast<const Bf16*>(block + at) : nullptr;
  };
  const auto fp32 = [block](bool has, size_t at) {
    return has ? reinterpret_cast<const float*>(block + at) : nullptr;
  };
  LayerWeights w;
  w.input_norm = bf16(true, layer_.input_norm);
  w.post_norm = bf16(true, layer_.post_norm);
  w.q_norm = bf16(config_.qk_norm, layer_.q_norm);
  w.k_norm = bf16(config_.qk_norm, layer_.k_norm);
  w.qkv = {shape_.qkv, block + layer_.qkv};
  w.o = {shape_.o, block + layer_.o};
  w.gate_up = {shape_.gate_up, block + layer_.gate_up};
  w.down = {shape_.down, block + layer_.down};
  w.qkv_bias = fp32(config_.qkv_bias, layer_.qkv_bias);
  w.o_bias = fp32(config_.o_bias, layer_.o_bias);
  w.gate_up_bias = fp32(config_.mlp_bias, layer_.gate_up_bias);
  w.down_bias = fp32(config_.mlp_bias, layer_.down_bias);
  return w;
}

HeadWeights WeightLayout::BindHead(const std::byte* block) const {
  return {reinterpret_cast<const Bf16*>(block), {shape_.head, block + head_weight_}};
}

std::vector<std::string> WeightLayout::TensorsOf(int block) const {
  if (block == 0) return {kEmbeddingName};
  if (block == head_block()) {
    return {kFinalNormName, config_.tie_word_embeddings ? kEmbeddingName : kLmHeadName};
  }
  std::vector<std::string> names;
  const std::string prefix = LayerTensorName(block - 1, "");
  for (TensorSpec& spec : ExpectedTensors(config_)) {
    if (absl::StartsWith(spec.name, prefix)) names.push_back(std::move(spec.name));
  }
  return names;
}

void WeightLayout::PackBlock(const TensorSet& tensors, const Ops& ops, int block,
                             std::byte* out) const {
  std::memset(out, 0, BlockBytes(block));
  if (block == 0) {
    CopyBf16(Get(tensors, kEmbeddingName), out);
  } else if (block == head_block()) {
    CopyBf16(Get(tensors, kFinalNormName), out);
    const std::string name = config_.tie_word_embeddings ? kEmbeddingName : kLmHeadName;
    PackParts(shape_.head, {RowsOf(Get(tensors, name), shape_.vocab)}, ops, out + head_weight_);
  } else {
    PackLayer(tensors, ops, block - 1, out);
  }
}

void WeightLayout::PackLayer(const TensorSet& tensors, const Ops& ops, int layer,
                             std::byte* out) const {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const auto get = [&](const std::string& name) -> const Tensor& {
    return Get(tensors, prefix + name);
  };
  const Interval kv_rows = Scale(shape_.kv_heads, config_.head_dim);
  const Interval q_rows = Scale(kv_rows, config_.num_heads / config_.num_kv_heads);

  CopyBf16(get("input_layernorm.weight"), out + layer_.input_norm);
  CopyBf16(get("post_attention_layernorm.weight"), out + layer_.post_norm);
  if (config_.qk_norm) {
    CopyBf16(get("self_attn.q_norm.weight"), out + layer_.q_norm);
    CopyBf16(get("self_attn.k_norm.weight"), out + layer_.k_norm);
  }

  const auto qkv = [&](const std::string& kind) -> std::vector<Part> {
    return {RowsOf(get("self_attn.q_proj." + kind), q_rows),
            RowsOf(get("self_attn.k_proj." + kind), kv_rows),
            RowsOf(get("self_attn.v_proj." + kind), kv_rows)};
  };
  const auto gate_up = [&](const std::string& kind) -> std::vector<Part> {
    return {RowsOf(get("mlp.gate_proj." + kind), shape_.intermediate),
            RowsOf(get("mlp.up_proj." + kind), shape_.intermediate)};
  };
  const auto all = [&](const std::string& name) -> std::vector<Part> {
    return {RowsOf(get(name), {0, get(name).shape[0]})};
  };
  PackParts(shape_.qkv, qkv("weight"), ops, out + layer_.qkv);
  PackParts(shape_.gate_up, gate_up("weight"), ops, out + layer_.gate_up);
  PackParts(shape_.o, {ColumnsOf(get("self_attn.o_proj.weight"), q_rows)}, ops, out + layer_.o);
  PackParts(shape_.down, {ColumnsOf(get("mlp.down_proj.weight"), shape_.intermediate)}, ops,
            out + layer_.down);

  if (config_.qkv_bias) CopyBias(qkv("bias"), out + layer_.qkv_bias);
  if (config_.o_bias) CopyBias(all("self_attn.o_proj.bias"), out + layer_.o_bias);
  if (config_.mlp_bias) {
    CopyBias(gate_up("bias"), out + layer_.gate_up_bias);
    CopyBias(all("mlp.down_proj.bias"), out + layer_.down_bias);
  }
}

}  // namespace isobit
