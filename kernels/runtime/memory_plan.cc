// See memory_plan.h.
#include "kernels/runtime/memory_plan.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/collective/copy_engine_sum.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/model/rank_shape.h"
#include "kernels/model/step_halves.h"
#include "kernels/model/transformer.h"
#include "kernels/model/weights.h"
#include "kernels/runtime/cuda_rank_options.h"

namespace isobit {
namespace {

// Workspaces of attention and cuBLAS, mailboxes of the all-reduce, graphs.
constexpr double kOtherBytes = 2e9;

}  // namespace

absl::StatusOr<int32_t> AffordablePages(const ModelConfig& config,
                                        const MemoryPlanOptions& options) {
  const auto size = static_cast<int>(options.devices.size());
  auto pages = static_cast<double>(std::numeric_limits<int32_t>::max());
  for (int r = 0; r < size; ++r) {
    const int device = options.devices[static_cast<size_t>(r)];
    ISOBIT_ASSIGN_OR_RETURN(const auto ops, MakeCudaOps({.device = device, .mode = options.mode}));
    ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(config, r, size));
    const WeightLayout layout(config, shape, ops->packer());
    double needed = kOtherBytes;
    for (int block = 0; block < layout.num_blocks(); ++block) {
      needed += static_cast<double>(layout.BlockBytes(block));
    }
    const auto rows = static_cast<double>(options.max_rows);
    const auto sequences = static_cast<double>(options.max_sequences);
    needed += static_cast<double>(Transformer::ReservedBytes(layout, options.max_rows));
    needed += rows * static_cast<double>(config.hidden_size) * sizeof(Bf16);
    // The rank's columns of all logits, and its share of whole rows.
    needed += 2.0 * (sequences / size + 1) * static_cast<double>(config.vocab_size) * sizeof(float);

    // The sums of steps in halves.
    const bool peers = size > 1 && options.peer_memory;
    if (peers && options.mode == NumericsMode::kTree && options.max_rows >= kOverlapRows) {
      needed += static_cast<double>(cuda::CopyEngineSum::SharedBytes(
          {.hidden = config.hidden_size, .max_rows = MostRowsOfHalf(options.max_rows)}, size));
    }

    // What NCCL brings together: partial sums (NcclAllReduce) and all ranks' logits.
    const bool vanilla = options.mode == NumericsMode::kVanilla;
    if (size > 1 && (vanilla || !options.peer_memory)) {
      needed += rows * static_cast<double>(config.hidden_size) *
                (vanilla ? sizeof(Bf16) : static_cast<double>(size + 1) * sizeof(float));
    }
    if (size > 1 && !options.peer_memory) {
      needed += (sequences + size) * static_cast<double>(config.vocab_size) * sizeof(float);
    }

    size_t free = 0;
    size_t total = 0;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total));
    const auto sharers =
        static_cast<double>(std::count(options.devices.begin(), options.devices.end(), device));
    const double usable = static_cast<double>(free) * options.fraction / sharers;
    const auto page_bytes =
        static_cast<double>(KvCache::PageBytes(config, shape, options.page_size));
    if (usable - needed < page_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("GPU ", device, ": weights and activations of rank ", r, " take ",
                       needed / 1e9, " GB, which leaves no KV page of ", free / 1e9,
                       " GB free memory, of which ", options.fraction,
                       " may be taken; more ranks, fewer tokens in a step or a larger "
                       "fraction would help"));
    }
    if (page_bytes > 0) pages = std::min(pages, (usable - needed) / page_bytes);
  }
  return static_cast<int32_t>(pages);
}

}  // namespace isobit
