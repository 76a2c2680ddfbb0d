// The jobs of each rank, and their reads, sums and packs on its GPU.
#include "kernels/model/pack_from_device.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/strict_json.h"  // Quoted
#include "common/checkpoint/tensor_names.h"
#include "common/checkpoint/tensor_source.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWordValues = 4;  // of the weight digest

Interval Common(const Interval& a, const Interval& b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

class BlockReader final : public SliceSource {
 public:
  BlockReader(const std::vector<Tensor>& tensors, const WeightBlocks& blocks)
      : tensors_(tensors),
        handles_(blocks.handles),
        memory_(blocks.handles.size()),
        blocks_of_(BlocksOfTensors(tensors, blocks)) {}

  absl::Status Fetch(absl::Span<const WantedSlice> slices, DevicePacker& packer) override {
    for (const WantedSlice& wanted : slices) {
      for (const WeightBlock* block : blocks_of_[wanted.tensor]) {
        ISOBIT_RETURN_IF_ERROR(FetchPart(wanted, *block, packer));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status FetchPart(const WantedSlice& wanted, const WeightBlock& block,
                         DevicePacker& packer) {
    const Slice& slice = wanted.slice;
    const auto [rows, columns] = CommonPart(slice, block);
    if (rows.size() == 0 || columns.size() == 0) return absl::OkStatus();
    const DType dtype = tensors_[wanted.tensor].dtype;
    const int64_t first =
        (rows.begin - block.first_row) * block.row_stride + columns.begin - block.first_column;
    ISOBIT_ASSIGN_OR_RETURN(const std::byte* const values, BeginOf(block, packer));
    const StoredMatrix from = {.values = values + static_cast<size_t>(first) * ItemSize(dtype),
                               .stored_as = StoredAsOf(dtype),
                               .rows = rows.size(),
                               .columns = columns.size(),
                               .stride = block.row_stride};
    const int64_t width = slice.columns.size();
    return packer.Round(
        from,
        wanted.to + (rows.begin - slice.rows.begin) * width + columns.begin - slice.columns.begin,
        width);
  }

  // The block's first value.
  absl::StatusOr<const std::byte*> BeginOf(const WeightBlock& block, DevicePacker& packer) {
    std::optional<ForeignMemory>& memory = memory_[block.holder];
    if (!memory.has_value()) {
      ISOBIT_ASSIGN_OR_RETURN(memory, packer.MapForeign(handles_[block.holder]));
    }
    const Tensor& tensor = tensors_[block.tensor];
    const auto values =
        static_cast<uint64_t>((block.num_rows - 1) * block.row_stride + block.num_columns);
    const uint64_t bytes = values * ItemSize(tensor.dtype);
    if (block.offset > memory->bytes || bytes > memory->bytes - block.offset) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(tensor.name), ": ", bytes,
                                                     " bytes from ", block.offset,
                                                     ", the memory has ", memory->bytes));
    }
    return memory->begin + block.offset;
  }

  const std::vector<Tensor>& tensors_;
  const std::vector<std::string>& handles_;
  std::vector<std::optional<ForeignMemory>> memory_;  // [holder]
  const std::vector<std::vector<const WeightBlock*>> blocks_of_;
};

// What a rank stages for one block, or, without a task, for sums alone.
struct Job {
  const PackTask* task = nullptr;
  std::vector<WantedSlice> slices{};  // `to` is not set
  std::vector<size_t> offsets{};      // of each slice, in values
  std::vector<bool> is_summed{};      // of each slice: whether it counts for the digest
  size_t num_values = 0;
};

Slice WholeOf(const Tensor& tensor) {
  return {.rows = {0, tensor.shape.empty() ? 1 : tensor.shape[0]},
          .columns = {0, tensor.shape.size() > 1 ? tensor.shape[1] : 1}};
}

int64_t SizeOf(const Slice& slice) { return slice.rows.size() * slice.columns.size(); }

using Jobs = std::vector<std::vector<Job>>;  // [rank]

// Chooses slices that together are the whole tensor, each value once, and marks them as summed.
// False: there are none.
bool ChooseSummed(const Tensor& tensor, size_t number, Jobs& jobs) {
  const Slice whole = WholeOf(tensor);
  // By the block: whoever cuts a tensor cuts it for all ranks of a block alike.
  std::map<int, std::map<std::pair<int64_t, int64_t>, std::pair<Job*, size_t>>> cuts;
  for (std::vector<Job>& of_rank : jobs) {
    for (Job& job : of_rank) {
      for (size_t s = 0; s < job.slices.size(); ++s) {
        const Slice& slice = job.slices[s].slice;
        if (job.slices[s].tensor != number || SizeOf(slice) == 0) continue;
        if (SizeOf(slice) == SizeOf(whole)) return job.is_summed[s] = true;
        if (slice.columns.begin % kWordValues != 0) continue;
        cuts[job.task->block].emplace(std::pair(slice.rows.begin, slice.columns.begin),
                                      std::pair(&job, s));
      }
    }
  }
  for (auto& [block, cut] : cuts) {
    int64_t covered = 0;
    int64_t row = 0;
    int64_t column = 0;
    bool follows = true;  // each slice begins where the one before it ends
    for (auto& [begin, place] : cut) {
      const Slice& slice = place.first->slices[place.second].slice;
      follows = follows && (begin.first == row || begin.second == column);
      row = slice.rows.end;
      column = slice.columns.end;
      covered += SizeOf(slice);
    }
    if (!follows || covered != SizeOf(whole)) continue;
    for (auto& [begin, place] : cut) place.first->is_summed[place.second] = true;
    return true;
  }
  return false;
}

absl::StatusOr<Jobs> PlanJobs(const std::vector<PackTask>& tasks,
                              const std::vector<Tensor>& tensors) {
  size_t num_ranks = 1;
  for (const PackTask& task : tasks) num_ranks = std::max(num_ranks, task.rank + 1);
  Jobs jobs(num_ranks);
  for (const PackTask& task : tasks) {
    Job job{.task = &task};
    for (const StagedSlice& staged : task.layout->StagingOf(task.block, &job.num_values)) {
      const Tensor* const tensor = FindTensor(tensors, staged.tensor->name);
      if (tensor == nullptr) {
        return absl::InternalError(absl::StrCat("no tensor ", Quoted(staged.tensor->name)));
      }
      job.slices.push_back(
          {.tensor = static_cast<size_t>(tensor - tensors.data()), .slice = staged.slice});
      job.offsets.push_back(staged.offset);
    }
    job.is_summed.resize(job.slices.size());
    jobs[task.rank].push_back(std::move(job));
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (ChooseSummed(tensors[t], t, jobs)) continue;
    // Nobody needs it, or all of it, as it lies.
    const Slice whole = WholeOf(tensors[t]);
    jobs.front().push_back({.slices = {{.tensor = t, .slice = whole}},
                            .offsets = {0},
                            .is_summed = {true},
                            .num_values = static_cast<size_t>(SizeOf(whole))});
  }
  return jobs;
}

// One rank's packing.
class RankPacking {
 public:
  RankPacking(const std::vector<Tensor>& tensors, DevicePacker& packer, SliceSource& source,
              WeightStore& store)
      : tensors_(tensors), packer_(packer), source_(source), store_(store) {}

  absl::Status Prepare(const std::vector<Job>& jobs) {
    size_t staged = 1;
    size_t packed = 1;
    for (const Job& job : jobs) {
      staged = std::max(staged, job.num_values * sizeof(Bf16));
      if (job.task != nullptr && store_.DevicePlaceOf(*job.task) == nullptr) {
        packed = std::max(packed, job.task->bytes);
      }
    }
    const size_t sums = tensors_.size() * kWeightSums * sizeof(uint64_t);
    ISOBIT_ASSIGN_OR_RETURN(staged_, packer_.Allocate(staged));
    ISOBIT_ASSIGN_OR_RETURN(packed_, packer_.Allocate(packed));
    ISOBIT_ASSIGN_OR_RETURN(sums_, packer_.Allocate(sums));
    ISOBIT_RETURN_IF_ERROR(packer_.FillWithZeros(sums_.get(), sums));
    std::vector<absl::Span<const WantedSlice>> slices;
    slices.reserve(jobs.size());
    for (const Job& job : jobs) slices.push_back(job.slices);
    return source_.Plan(slices);
  }

  absl::Status Run(Job& job) {
    auto* const staged = reinterpret_cast<Bf16*>(staged_.get());
    for (size_t s = 0; s < job.slices.size(); ++s) job.slices[s].to = staged + job.offsets[s];
    ISOBIT_RETURN_IF_ERROR(source_.Fetch(job.slices, packer_));
    for (size_t s = 0; s < job.slices.size(); ++s) {
      if (job.is_summed[s]) ISOBIT_RETURN_IF_ERROR(AddSums(job.slices[s]));
    }
    return job.task == nullptr ? absl::OkStatus() : Pack(*job.task, staged);
  }

  // The sums of all jobs, kWeightSums for each tensor.
  absl::StatusOr<std::vector<uint64_t>> Finish() {
    std::vector<uint64_t> sums(tensors_.size() * kWeightSums);
    ISOBIT_RETURN_IF_ERROR(packer_.Copy(sums.data(), sums_.get(), sums.size() * sizeof(uint64_t)));
    ISOBIT_RETURN_IF_ERROR(packer_.Finish());
    return sums;
  }

 private:
  absl::Status AddSums(const WantedSlice& wanted) {
    const Slice& slice = wanted.slice;
    const PartOfTensor part = {.first_row = slice.rows.begin,
                               .first_column = slice.columns.begin,
                               .tensor_columns = WholeOf(tensors_[wanted.tensor]).columns.size()};
    return packer_.AddSums(wanted.to, slice.rows.size(), slice.columns.size(), part,
                           reinterpret_cast<uint64_t*>(sums_.get()) + kWeightSums * wanted.tensor);
  }

  absl::Status Pack(const PackTask& task, const Bf16* staged) {
    std::byte* const place = store_.DevicePlaceOf(task);
    std::byte* const out = place != nullptr ? place : packed_.get();
    const size_t block_bytes = task.layout->BlockBytes(task.block);
    ISOBIT_RETURN_IF_ERROR(task.layout->PackStaged(task.block, staged, packer_, out));
    if (task.bytes > block_bytes) {
      ISOBIT_RETURN_IF_ERROR(packer_.FillWithZeros(out + block_bytes, task.bytes - block_bytes));
    }
    if (place != nullptr) return absl::OkStatus();
    // It waits in host memory, or is cut.
    if (task.place != nullptr) ISOBIT_RETURN_IF_ERROR(packer_.Copy(task.place, out, task.bytes));
    ISOBIT_RETURN_IF_ERROR(packer_.Finish());
    return task.place != nullptr ? absl::OkStatus() : store_.Put(task, out);
  }

  const std::vector<Tensor>& tensors_;
  DevicePacker& packer_;
  SliceSource& source_;
  WeightStore& store_;
  Memory staged_;
  Memory packed_;
  Memory sums_;
};

// The digests of the tensors, of the sums of all ranks.
absl::StatusOr<TensorDigests> JoinSums(
    const std::vector<Tensor>& tensors,
    const std::vector<absl::StatusOr<std::vector<uint64_t>>>& sums, bool allow_nonfinite) {
  TensorDigests digests;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Tensor& tensor = tensors[t];
    uint64_t total[kWeightSums] = {};
    for (const auto& of_rank : sums) {
      const uint64_t* const part = of_rank->data() + kWeightSums * t;
      total[0] += part[0];
      total[1] += part[1];
      total[2] = std::max(total[2], part[2]);
    }
    if (total[2] != 0 && !allow_nonfinite && !IsRotaryBuffer(tensor.name)) {
      return NonfiniteError(tensor.name, tensor.shape, ~total[2]);
    }
    digests[tensor.name] = {.shape = tensor.shape,
                            .digest = absl::StrFormat("%016x%016x", total[0], total[1])};
  }
  return digests;
}

}  // namespace

StoredAs StoredAsOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return StoredAs::kBf16;
    case DType::kF16:
      return StoredAs::kF16;
    case DType::kF32:
      break;
  }
  return StoredAs::kF32;
}

std::vector<std::vector<const WeightBlock*>> BlocksOfTensors(const std::vector<Tensor>& tensors,
                                                             const WeightBlocks& blocks) {
  std::vector<std::vector<const WeightBlock*>> blocks_of(tensors.size());
  for (const WeightBlock& block : blocks.blocks) blocks_of[block.tensor].push_back(&block);
  return blocks_of;
}

Slice CommonPart(const Slice& slice, const WeightBlock& block) {
  return {.rows = Common(slice.rows, {block.first_row, block.first_row + block.num_rows}),
          .columns =
              Common(slice.columns, {block.first_column, block.first_column + block.num_columns})};
}

std::unique_ptr<SliceSource> ReadBlocks(const std::vector<Tensor>& tensors,
                                        const WeightBlocks& blocks) {
  return std::make_unique<BlockReader>(tensors, blocks);
}

absl::StatusOr<std::string> PackFromDevice(
    const std::vector<Tensor>& tensors,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<SliceSource>>(size_t rank, size_t num_ranks,
                                                                   DevicePacker&)>
        make_source,
    absl::FunctionRef<absl::Status()> check, WeightStore& store, bool allow_nonfinite) {
  const Clock::time_point start = Clock::now();
  // Before the store takes memory.
  ISOBIT_RETURN_IF_ERROR(store.MakePacker(0).status());
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<PackTask> tasks, store.Plan());
  ISOBIT_ASSIGN_OR_RETURN(Jobs jobs, PlanJobs(tasks, tensors));
  std::vector<absl::StatusOr<std::vector<uint64_t>>> sums(jobs.size(), absl::UnknownError(""));
  std::vector<std::thread> threads;  // a sender may serve all ranks in turn
  const auto pack = [&](size_t rank) -> absl::StatusOr<std::vector<uint64_t>> {
    ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<DevicePacker> packer, store.MakePacker(rank));
    ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<SliceSource> source,
                            make_source(rank, jobs.size(), *packer));
    RankPacking packing(tensors, *packer, *source, store);
    const auto run = [&]() -> absl::StatusOr<std::vector<uint64_t>> {
      ISOBIT_RETURN_IF_ERROR(packing.Prepare(jobs[rank]));
      for (Job& job : jobs[rank]) {
        ISOBIT_RETURN_IF_ERROR(check());
        ISOBIT_RETURN_IF_ERROR(Failpoint("weights.read"));
        ISOBIT_RETURN_IF_ERROR(packing.Run(job));
      }
      return packing.Finish();
    };
    absl::StatusOr<std::vector<uint64_t>> of_rank = run();
    ISOBIT_RETURN_IF_ERROR(source->End(of_rank.status()));
    return of_rank;
  };
  for (size_t rank = 1; rank < jobs.size(); ++rank) {
    threads.emplace_back([&, rank] { sums[rank] = pack(rank); });
  }
  sums[0] = pack(0);
  for (std::thread& thread : threads) thread.join();
  for (const auto& of_rank : sums) ISOBIT_RETURN_IF_ERROR(of_rank.status());
  CheckpointDigests digests;
  ISOBIT_ASSIGN_OR_RETURN(digests.tensors, JoinSums(tensors, sums, allow_nonfinite));
  digests.checkpoint = WeightDigest(digests.tensors);
  store.KeepDigests(DigestsOfWeights(digests.tensors));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.packed"));
  ISOBIT_LOG(Info) << absl::StrFormat("weights: packed on GPUs in %.3f s",
                                      std::chrono::duration<double>(Clock::now() - start).count());
  if (tasks.empty()) return std::move(digests.checkpoint);
  return CheckDigests(std::move(digests), tasks.front().layout->plan(), /*expected_digest=*/"");
}

}  // namespace isobit
