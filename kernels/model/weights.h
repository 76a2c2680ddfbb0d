// A rank's weights as byte blocks: one for the embedding, one for each layer, one for the head. A
// block is what a trainer shards and gathers, and what an update replaces; its layout is a pure
// function of config, rank and backend.
#ifndef ISOBIT_KERNELS_MODEL_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/weight_reader.h"
#include "kernels/model/rank_shape.h"
#include "kernels/ops.h"

namespace isobit {

// One decoder layer, pointing into its block. Biases and norms that the architecture lacks are
// null.
struct LayerWeights {
  const Bf16* input_norm = nullptr;  // [hidden]
  const Bf16* post_norm = nullptr;   // [hidden]
  const Bf16* q_norm = nullptr;      // [head_dim]
  const Bf16* k_norm = nullptr;      // [head_dim]
  LinearWeight qkv;
  LinearWeight o;
  LinearWeight gate_up;
  LinearWeight down;
  const float* qkv_bias = nullptr;      // [qkv.n]
  const float* o_bias = nullptr;        // [hidden]
  const float* gate_up_bias = nullptr;  // [gate_up.n]
  const float* down_bias = nullptr;     // [hidden]
};

struct HeadWeights {
  const Bf16* norm = nullptr;  // [hidden]
  LinearWeight head;
};

// Where everything lies. Blocks are numbered 0 (embedding), 1 .. num_layers (layers), num_layers +
// 1 (head).
class WeightLayout {
 public:
  WeightLayout(const ModelConfig& config, const RankShape& shape, const Ops& ops);

  const ModelConfig& config() const { return config_; }
  const RankShape& shape() const { return shape_; }
  int num_blocks() const { return config_.num_layers + 2; }
  int head_block() const { return config_.num_layers + 1; }
  size_t BlockBytes(int block) const;

  const Bf16* BindEmbedding(const std::byte* block) const {
    return reinterpret_cast<const Bf16*>(block);
  }  // [vocab, hidden]
  LayerWeights BindLayer(const std::byte* block) const;
  HeadWeights BindHead(const std::byte* block) const;

  // The names of the tensors that a block is packed from.
  std::vector<std::string> TensorsOf(int block) const;

  // Converts, cuts and packs a block out of those tensors, which a source had that ValidateTensors
  // accepted. `out` holds BlockBytes(block) bytes, 128-byte aligned; padding is zeroed, so equal
  // weights give equal bytes.
  void PackBlock(const TensorSet& tensors, const Ops& ops, int block, std::byte* out) const;

 private:
  struct LayerOffsets {
    size_t input_norm, post_norm, q_norm, k_norm, qkv, o, gate_up, down;
    size_t qkv_bias, o_bias, gate_up_bias, down_bias, end;
  };
  void PackLayer(const TensorSet& tensors, const Ops& ops, int layer, std::byte* out) const;

  ModelConfig config_;
  RankShape shape_;
  LayerOffsets layer_{};
  size_t head_weight_ = 0;
  size_t head_end_ = 0;
};

// Hands a forward pass its blocks.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // The block's bytes, readable until Release(block). May wait for a gather.
  virtual absl::StatusOr<const std::byte*> Acquire(int block) = 0;
  virtual void Release(int block) = 0;
};

// 128-byte aligned bytes.
struct AlignedFree {
  void operator()(std::byte* p) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;
AlignedBytes AllocateAligned(size_t bytes);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_WEIGHTS_H_
