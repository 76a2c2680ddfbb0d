// How many sequences' keys fit into half of what the weights leave.
#include "rollout/service/default_limits.h"

#include <algorithm>

#include "common/base/status_macros.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {
namespace {

constexpr int64_t kMostRunning = 512;  // steps of more replay no graph
constexpr int64_t kTokensOfEach = 1024;
constexpr int64_t kBatchTokens = 16384;
constexpr int64_t kFewBatchTokens = 8192;

}  // namespace

absl::StatusOr<DefaultLimits> DefaultLimitsOf(const ModelConfig& config, int tensor_parallel_size,
                                              int64_t rank_bytes, bool linear_twice) {
  ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(config, 0, tensor_parallel_size));
  const PlainWeightPacker packer;
  const WeightLayout layout(config, shape, packer);
  const WeightLayout whole = linear_twice ? WeightLayout::WithCopies(layout, packer) : layout;
  int64_t left = rank_bytes;
  for (int block = 0; block < whole.num_blocks(); ++block) {
    left -= static_cast<int64_t>(whole.BlockBytes(block));
  }
  const auto token_bytes = static_cast<int64_t>(KvCache::PageBytes(layout.plan(), shape, 1));
  const int64_t each = std::min<int64_t>(kTokensOfEach, config.max_position_embeddings);
  int64_t running = kMostRunning;
  while (running > 1 && running * each * token_bytes > left / 2) running /= 2;
  const auto activations = static_cast<int64_t>(Transformer::ReservedBytes(layout, kBatchTokens));
  return DefaultLimits{
      .max_running = static_cast<size_t>(running),
      .max_batch_tokens = activations <= left / 16 ? kBatchTokens : kFewBatchTokens};
}

}  // namespace isobit
