// Lays out, cuts and packs a rank's weights. See weights.h.
#include "kernels/model/weights.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"

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

const Tensor& Get(const Checkpoint& checkpoint, const std::string& name) {
  const Tensor* tensor = checkpoint.Find(name);
  ISOBIT_CHECK(tensor != nullptr) << name << " is missing from a validated checkpoint";
  return *tensor;
}

// Rows [begin, end) of a tensor (elements, if it has one dimension), as a tensor of its own.
Tensor Rows(const Tensor& tensor, const Interval& rows) {
  Tensor part = tensor;
  const size_t row_bytes = tensor.size_bytes / static_cast<size_t>(tensor.shape[0]);
  part.shape[0] = rows.size();
  part.data = tensor.data + static_cast<size_t>(rows.begin) * row_bytes;
  part.size_bytes = static_cast<size_t>(rows.size()) * row_bytes;
  return part;
}

// Several row ranges below each other, as one matrix or vector.
std::vector<Bf16> StackBf16(const std::vector<Tensor>& parts) {
  size_t total = 0;
  for (const Tensor& part : parts) total += part.NumElements();
  std::vector<Bf16> stacked(total);
  size_t at = 0;
  for (const Tensor& part : parts) {
    part.ToBf16(stacked.data() + at);
    at += part.NumElements();
  }
  return stacked;
}

void CopyBf16(const Tensor& tensor, std::byte* out) { tensor.ToBf16(reinterpret_cast<Bf16*>(out)); }

// A bias is a bf16 parameter like any other, added in fp32.
void CopyBias(const std::vector<Tensor>& parts, std::byte* out) {
  const std::vector<Bf16> bias = StackBf16(parts);
  std::transform(bias.begin(), bias.end(), reinterpret_cast<float*>(out),
                 [](Bf16 x) { return contract::Bf16ToFloat(x); });
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

void WeightLayout::PackBlock(const Checkpoint& checkpoint, const Ops& ops, int block,
                             std::byte* out) const {
  std::memset(out, 0, BlockBytes(block));
  const std::string embedding = "model.embed_tokens.weight";
  if (block == 0) {
    CopyBf16(Get(checkpoint, embedding), out);
  } else if (block == head_block()) {
    CopyBf16(Get(checkpoint, "model.norm.weight"), out);
    const std::string name = config_.tie_word_embeddings ? embedding : "lm_head.weight";
    ops.Pack(shape_.head, StackBf16({Rows(Get(checkpoint, name), shape_.vocab)}).data(),
             shape_.head.k, out + head_weight_);
  } else {
    PackLayer(checkpoint, ops, block - 1, out);
  }
}

void WeightLayout::PackLayer(const Checkpoint& checkpoint, const Ops& ops, int layer,
                             std::byte* out) const {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const auto get = [&](const char* name) -> const Tensor& {
    return Get(checkpoint, prefix + name);
  };
  const Interval kv_rows = Scale(shape_.kv_heads, config_.head_dim);
  const Interval q_rows = Scale(kv_rows, config_.num_heads / config_.num_kv_heads);

  CopyBf16(get("input_layernorm.weight"), out + layer_.input_norm);
  CopyBf16(get("post_attention_layernorm.weight"), out + layer_.post_norm);
  if (config_.qk_norm) {
    CopyBf16(get("self_attn.q_norm.weight"), out + layer_.q_norm);
    CopyBf16(get("self_attn.k_norm.weight"), out + layer_.k_norm);
  }

  const auto qkv = [&](const char* kind) -> std::vector<Tensor> {
    return {Rows(get((std::string("self_attn.q_proj.") + kind).c_str()), q_rows),
            Rows(get((std::string("self_attn.k_proj.") + kind).c_str()), kv_rows),
            Rows(get((std::string("self_attn.v_proj.") + kind).c_str()), kv_rows)};
  };
  const auto gate_up = [&](const char* kind) -> std::vector<Tensor> {
    return {Rows(get((std::string("mlp.gate_proj.") + kind).c_str()), shape_.intermediate),
            Rows(get((std::string("mlp.up_proj.") + kind).c_str()), shape_.intermediate)};
  };
  ops.Pack(shape_.qkv, StackBf16(qkv("weight")).data(), shape_.qkv.k, out + layer_.qkv);
  ops.Pack(shape_.gate_up, StackBf16(gate_up("weight")).data(), shape_.gate_up.k,
           out + layer_.gate_up);
  const std::vector<Bf16> o = StackBf16({get("self_attn.o_proj.weight")});
  ops.Pack(shape_.o, o.data() + q_rows.begin, int64_t{config_.num_heads} * config_.head_dim,
           out + layer_.o);
  const std::vector<Bf16> down = StackBf16({get("mlp.down_proj.weight")});
  ops.Pack(shape_.down, down.data() + shape_.intermediate.begin, config_.intermediate_size,
           out + layer_.down);

  if (config_.qkv_bias) CopyBias(qkv("bias"), out + layer_.qkv_bias);
  if (config_.o_bias) CopyBias({get("self_attn.o_proj.bias")}, out + layer_.o_bias);
  if (config_.mlp_bias) {
    CopyBias(gate_up("bias"), out + layer_.gate_up_bias);
    CopyBias({get("mlp.down_proj.bias")}, out + layer_.down_bias);
  }
}

absl::StatusOr<std::unique_ptr<ResidentWeights>> ResidentWeights::Pack(
    const WeightLayout& layout, const Checkpoint& checkpoint, Ops& ops,
    std::shared_ptr<const std::byte> embedding) {
  std::unique_ptr<ResidentWeights> weights(new ResidentWeights);
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (block == 0 && embedding != nullptr) {
      weights->blocks_.push_back(std::move(embedding));
      continue;
    }
    const size_t bytes = layout.BlockBytes(block);
    std::shared_ptr<std::byte[]> packed = AllocateAligned(bytes);
    layout.PackBlock(checkpoint, ops, block, packed.get());
    ISOBIT_ASSIGN_OR_RETURN(
        auto shared, ops.Share(std::shared_ptr<const std::byte>(packed, packed.get()), bytes));
    weights->blocks_.push_back(std::move(shared));
  }
  return weights;
}

}  // namespace isobit
