// Staging on all cores, and the switch. See resident_weights.h.
#include "kernels/model/resident_weights.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/base/parallel_for.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

// Host memory for blocks that are packed but not yet in their place.
constexpr size_t kMaxPackingBytes = size_t{16} << 30;

Memory HostMemory(size_t bytes) {
  return Memory(AllocateAligned(bytes).release(), [](std::byte* p) { AlignedFree()(p); });
}

// Says in the log how far a long load is.
class Progress {
 public:
  explicit Progress(size_t total) : total_(total) {}

  void Add(size_t bytes) {
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    if (Clock::now() - logged_ < std::chrono::seconds(2)) return;
    logged_ = Clock::now();
    ISOBIT_LOG(Info) << absl::StrFormat("weights: %d %% of %.2f GB",
                                        100 * done_ / std::max<size_t>(total_, 1), 1e-9 * total_);
  }

  void Finish(size_t on_host) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    ISOBIT_LOG(Info) << absl::StrFormat(
        "weights: %.2f GB packed in %.1f s, %.2f GB of them left in host memory until the switch",
        1e-9 * total_, seconds, 1e-9 * on_host);
  }

 private:
  const size_t total_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;  // guards what follows
  size_t done_ = 0;
  Clock::time_point logged_ = start_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ResidentWeights>> ResidentWeights::Create(
    const WeightLayout& layout, Ops& ops, std::shared_ptr<std::byte[]> embedding) {
  std::unique_ptr<ResidentWeights> weights(new ResidentWeights(layout, ops));
  weights->owns_embedding_ = embedding == nullptr;
  weights->blocks_.push_back(std::move(embedding));
  weights->blocks_.resize(static_cast<size_t>(layout.num_blocks()));
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (!weights->owns(block)) continue;
    ISOBIT_ASSIGN_OR_RETURN(weights->blocks_[static_cast<size_t>(block)],
                            ops.Allocate(layout.BlockBytes(block)));
  }
  return weights;
}

size_t ResidentWeights::bytes() const {
  size_t total = 0;
  for (int block = 0; block < layout_.num_blocks(); ++block) {
    if (owns(block)) total += layout_.BlockBytes(block);
  }
  return total;
}

absl::Status ResidentWeights::Commit(const StagedBlocks& staged) {
  loaded_ = true;
  for (size_t block = 0; block < staged.size(); ++block) {
    if (staged[block] == nullptr) continue;
    ISOBIT_RETURN_IF_ERROR(ops_.Copy(blocks_[block].get(), staged[block].get(),
                                     layout_.BlockBytes(static_cast<int>(block))));
  }
  return ops_.Synchronize();
}

// One call of StageBlocks.
class WeightStager {
 public:
  WeightStager(const Checkpoint& checkpoint, absl::Span<ResidentWeights* const> ranks)
      : checkpoint_(checkpoint), ranks_(ranks), staged_(ranks.size()) {}

  absl::StatusOr<std::vector<StagedBlocks>> Run() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r] != nullptr) ISOBIT_RETURN_IF_ERROR(Plan(r));
    }
    // The largest first, so that the threads end together; else each layer on all ranks in turn, so
    // that all backends are kept busy.
    std::stable_sort(tasks_.begin(), tasks_.end(), [](const Task& a, const Task& b) {
      return a.bytes != b.bytes ? a.bytes > b.bytes : a.block < b.block;
    });
    size_t total = 0;
    for (const Task& task : tasks_) total += task.bytes;
    Progress progress(total);
    scratch_.resize(NumWorkers());
    ISOBIT_RETURN_IF_ERROR(
        ParallelFor(tasks_.size(), scratch_.size(), [&](size_t task, size_t worker) {
          ISOBIT_RETURN_IF_ERROR(Pack(tasks_[task], scratch_[worker]));
          progress.Add(tasks_[task].bytes);
          return absl::OkStatus();
        }));
    progress.Finish(on_host_);
    return std::move(staged_);
  }

 private:
  // A block to be packed, and where it goes.
  struct Task {
    ResidentWeights* rank;
    int block;
    size_t bytes;
    std::byte* place;
    bool on_host;  // place is host memory
  };
  struct Scratch {
    AlignedBytes memory;
    size_t bytes = 0;
  };

  // Finds a place for each block of a rank.
  absl::Status Plan(size_t r) {
    ResidentWeights& rank = *ranks_[r];
    staged_[r].resize(rank.blocks_.size());
    for (int block = 0; block < rank.layout_.num_blocks(); ++block) {
      if (!rank.owns(block)) continue;
      Task task = {&rank, block, rank.layout_.BlockBytes(block), nullptr, false};
      Memory& staged = staged_[r][static_cast<size_t>(block)];
      if (!rank.loaded_) {
        task.place = rank.blocks_[static_cast<size_t>(block)].get();
      } else {
        absl::StatusOr<Memory> beside = rank.ops_.AllocateBeside(task.bytes);
        task.on_host = absl::IsResourceExhausted(beside.status());
        if (task.on_host) {
          beside = HostMemory(task.bytes);
          on_host_ += task.bytes;
        }
        ISOBIT_ASSIGN_OR_RETURN(staged, std::move(beside));
        task.place = staged.get();
      }
      tasks_.push_back(task);
    }
    return absl::OkStatus();
  }

  // As many as the packed blocks of the largest tasks, one a worker, have room for.
  size_t NumWorkers() const {
    size_t count = 0;
    size_t bytes = 0;
    while (count < tasks_.size() && bytes + tasks_[count].bytes <= kMaxPackingBytes) {
      bytes += tasks_[count++].bytes;
    }
    return std::max<size_t>(count, 1);
  }

  absl::Status Pack(const Task& task, Scratch& scratch) const {
    const WeightLayout& layout = task.rank->layout_;
    Ops& ops = task.rank->ops_;
    if (task.on_host) {
      layout.PackBlock(checkpoint_, ops, task.block, task.place);
      return absl::OkStatus();
    }
    if (scratch.bytes < task.bytes) {
      scratch = {};
      scratch = {AllocateAligned(task.bytes), task.bytes};
    }
    layout.PackBlock(checkpoint_, ops, task.block, scratch.memory.get());
    return ops.Upload(task.place, scratch.memory.get(), task.bytes);
  }

  const Checkpoint& checkpoint_;
  const absl::Span<ResidentWeights* const> ranks_;
  std::vector<StagedBlocks> staged_;  // [rank]
  std::vector<Task> tasks_;
  std::vector<Scratch> scratch_;  // [worker]
  size_t on_host_ = 0;            // bytes staged in host memory
};

absl::StatusOr<std::vector<StagedBlocks>> StageBlocks(const Checkpoint& checkpoint,
                                                      absl::Span<ResidentWeights* const> ranks) {
  return WeightStager(checkpoint, ranks).Run();
}

}  // namespace isobit
