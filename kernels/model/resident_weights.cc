// Staging on all cores, and the switch. See resident_weights.h.
#include "kernels/model/resident_weights.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/parallel_for.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/opened_model.h"
#include "kernels/model/pack_model.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

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
    const WeightLayout& layout, Device& device, std::shared_ptr<std::byte[]> embedding) {
  std::unique_ptr<ResidentWeights> weights(new ResidentWeights(layout, device));
  weights->owns_embedding_ = embedding == nullptr;
  weights->blocks_.push_back(std::move(embedding));
  weights->blocks_.resize(static_cast<size_t>(layout.num_blocks()));
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (!weights->owns(block)) continue;
    ISOBIT_ASSIGN_OR_RETURN(weights->blocks_[static_cast<size_t>(block)],
                            device.Allocate(layout.BlockBytes(block)));
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
    ISOBIT_RETURN_IF_ERROR(device_.Copy(blocks_[block].get(), staged[block].get(),
                                        layout_.BlockBytes(static_cast<int>(block))));
    ISOBIT_RETURN_IF_ERROR(Failpoint("weights.commit"));
  }
  return device_.Synchronize();
}

// One call of StageBlocks.
class WeightStager {
 public:
  explicit WeightStager(absl::Span<ResidentWeights* const> ranks)
      : ranks_(ranks), staged_(ranks.size()) {}

  absl::StatusOr<StagedWeights> Run(const TensorSource& source,
                                    const std::string& expected_digest) {
    const WeightLayout* layout = nullptr;  // of any rank: blocks have the same tensors on all
    size_t num_ranks = 0;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r] == nullptr) continue;
      ISOBIT_RETURN_IF_ERROR(Plan(r));
      layout = &ranks_[r]->layout_;
      ++num_ranks;
    }
    if (layout == nullptr) {
      ISOBIT_ASSIGN_OR_RETURN(CheckpointDigests digests, DigestTensors(source));
      ISOBIT_RETURN_IF_ERROR(CheckDigest(digests.checkpoint, expected_digest));
      return StagedWeights{std::move(staged_), std::move(digests.checkpoint)};
    }
    const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const size_t threads = std::min(num_ranks, cores);  // for each group of blocks
    // One group more than the threads suffice for: some rest while a large tensor is hashed.
    const size_t num_workers = threads == 1 ? cores : cores / threads + 1;
    size_t total = 0;
    for (const Task& task : tasks_) total += task.bytes;
    Progress progress(total);
    scratch_.resize(num_workers * threads);
    ISOBIT_ASSIGN_OR_RETURN(
        std::string digest,
        PackModel(
            source, *layout,
            {.expected_digest = expected_digest,
             .max_workers = num_workers,
             .threads_per_group = threads},
            [&](const BlockGroup& group) { return threads * LargestTask(group); },
            [&](const BlockGroup& group, const TensorSet& tensors, size_t worker) {
              return PackGroup(group, tensors, &scratch_[worker * threads], threads, progress);
            }));
    progress.Finish(on_host_);
    return StagedWeights{std::move(staged_), std::move(digest)};
  }

 private:
  // A block to be packed, and where it goes.
  struct Task {
    ResidentWeights* rank;
    int block;
    size_t bytes;
    std::byte* place;
    bool on_host;  // place is host memory, which is packed into without an upload
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
      Task task = {&rank, block, rank.layout_.BlockBytes(block), nullptr, rank.device_.is_host()};
      Memory& staged = staged_[r][static_cast<size_t>(block)];
      if (!rank.loaded_) {
        task.place = rank.blocks_[static_cast<size_t>(block)].get();
      } else {
        absl::StatusOr<Memory> beside = rank.device_.AllocateBeside(task.bytes);
        if (absl::IsResourceExhausted(beside.status())) {
          task.on_host = true;
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

  // The tasks of these blocks, of all ranks.
  std::vector<const Task*> TasksOf(const BlockGroup& group) const {
    std::vector<const Task*> tasks;
    for (const Task& task : tasks_) {
      if (absl::c_linear_search(group.blocks, task.block)) tasks.push_back(&task);
    }
    return tasks;
  }

  size_t LargestTask(const BlockGroup& group) const {
    size_t bytes = 0;
    for (const Task* task : TasksOf(group)) bytes = std::max(bytes, task->bytes);
    return bytes;
  }

  // scratch: of `threads` threads.
  absl::Status PackGroup(const BlockGroup& group, const TensorSet& tensors, Scratch* scratch,
                         size_t threads, Progress& progress) const {
    const std::vector<const Task*> tasks = TasksOf(group);
    return ParallelFor(tasks.size(), threads, [&](size_t task, size_t thread) {
      ISOBIT_RETURN_IF_ERROR(Pack(*tasks[task], tensors, scratch[thread]));
      progress.Add(tasks[task]->bytes);
      return absl::OkStatus();
    });
  }

  static absl::Status Pack(const Task& task, const TensorSet& tensors, Scratch& scratch) {
    const WeightLayout& layout = task.rank->layout_;
    Device& device = task.rank->device_;
    if (task.on_host) {
      layout.PackBlock(tensors, task.block, task.place);
      return absl::OkStatus();
    }
    if (scratch.bytes < task.bytes) {
      scratch = {};
      scratch = {AllocateAligned(task.bytes), task.bytes};
    }
    layout.PackBlock(tensors, task.block, scratch.memory.get());
    return device.Upload(task.place, scratch.memory.get(), task.bytes);
  }

  const absl::Span<ResidentWeights* const> ranks_;
  std::vector<StagedBlocks> staged_;  // [rank]
  std::vector<Task> tasks_;
  std::vector<Scratch> scratch_;  // [worker][thread]
  size_t on_host_ = 0;            // bytes staged in host memory
};

absl::StatusOr<StagedWeights> StageBlocks(const TensorSource& source,
                                          const std::string& expected_digest,
                                          absl::Span<ResidentWeights* const> ranks) {
  return WeightStager(ranks).Run(source, expected_digest);
}

}  // namespace isobit
