// See pack_model.h.
#include "kernels/model/pack_model.h"

#include <algorithm>

#include "common/base/failpoint.h"
#include "common/base/parallel_for.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/opened_model.h"

namespace isobit {
namespace {

// Host memory for tensors that are read and blocks that are packed but not yet in their place.
constexpr size_t kMaxPackingBytes = size_t{16} << 30;

void AddBlock(const WeightLayout& layout, int block, BlockGroup& group) {
  group.blocks.push_back(block);
  for (std::string& name : layout.TensorsOf(block)) {
    const bool known =
        std::find(group.tensors.begin(), group.tensors.end(), name) != group.tensors.end();
    if (!known) group.tensors.push_back(std::move(name));
  }
}

// The largest first, so that the threads end together.
std::vector<BlockGroup> GroupBlocks(const WeightLayout& layout, const TensorSource& source) {
  std::vector<BlockGroup> groups;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    const bool tied = block == layout.head_block() && layout.config().tie_word_embeddings;
    if (!tied) groups.emplace_back();
    AddBlock(layout, block, tied ? groups.front() : groups.back());
  }
  for (BlockGroup& group : groups) {
    for (const std::string& name : group.tensors) group.bytes += source.Find(name)->size_bytes;
  }
  std::stable_sort(groups.begin(), groups.end(),
                   [](const BlockGroup& a, const BlockGroup& b) { return a.bytes > b.bytes; });
  return groups;
}

}  // namespace

absl::StatusOr<std::string> PackModel(
    const TensorSource& source, const WeightLayout& layout, const PackModelOptions& options,
    absl::FunctionRef<size_t(const BlockGroup&)> packing_bytes,
    absl::FunctionRef<absl::Status(const BlockGroup&, const TensorSet&, size_t worker)> pack) {
  const std::vector<BlockGroup> groups = GroupBlocks(layout, source);
  // As many as the largest groups, one a worker, leave room for.
  size_t num_workers = 0;
  for (size_t bytes = 0; num_workers < std::min(groups.size(), options.max_workers);
       ++num_workers) {
    bytes += groups[num_workers].bytes + packing_bytes(groups[num_workers]);
    if (bytes > kMaxPackingBytes) break;
  }
  num_workers = std::max<size_t>(num_workers, 1);

  WeightReader reader(source);
  std::vector<TensorSet> tensors(num_workers);
  ISOBIT_RETURN_IF_ERROR(
      ParallelFor(groups.size(), num_workers, [&](size_t item, size_t worker) -> absl::Status {
        ISOBIT_RETURN_IF_ERROR(
            reader.Read(groups[item].tensors, options.threads_per_group, tensors[worker]));
        ISOBIT_RETURN_IF_ERROR(Failpoint("weights.read"));
        return pack(groups[item], tensors[worker], worker);
      }));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.packed"));
  return FinishReading(reader, layout.plan(), options.expected_digest);
}

}  // namespace isobit
