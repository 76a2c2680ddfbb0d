// The jobs of all blocks by the tensors that they share, and the workers.
#include "kernels/model/pack_model.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/base/failpoint.h"
#include "common/base/log.h"
#include "common/base/parallel_for.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/weight_reader.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;

// Host memory for tensors that were read and for packed blocks on their way to the store.
constexpr size_t kMaxPackingBytes = size_t{16} << 30;

// Logs the progress of a long load.
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

  void Finish() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    ISOBIT_LOG(Info) << absl::StrFormat("weights: %.2f GB packed in %.1f s", 1e-9 * total_,
                                        seconds);
  }

 private:
  const size_t total_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;  // guards what follows
  size_t done_ = 0;
  Clock::time_point logged_ = start_;
};

// Blocks that are packed together, on all ranks, because they share tensors.
struct PackJob {
  std::vector<PackTask> tasks;
  std::vector<std::string> tensors = {};
  size_t tensor_bytes = 0;
  size_t largest_task = 0;  // bytes
  size_t arrival = 0;       // of the last tensor
};

// Tasks that share a tensor, directly or through other tasks, form one job.
std::vector<PackJob> PackJobsOf(const std::vector<PackTask>& tasks, const TensorSource& source) {
  std::vector<PackJob> jobs;
  std::map<std::string, size_t> job_of;  // by tensor
  for (const PackTask& task : tasks) {
    const size_t own = jobs.size();
    jobs.push_back({.tasks = {task}});
    for (const std::string& name : task.layout->TensorsOf(task.block)) {
      const size_t other = job_of.emplace(name, own).first->second;
      if (other == own) continue;
      for (auto& [tensor, job] : job_of) job = job == other ? own : job;
      for (const PackTask& joined : std::exchange(jobs[other].tasks, {})) {
        jobs[own].tasks.push_back(joined);
      }
    }
  }
  for (const auto& [name, index] : job_of) {
    PackJob& job = jobs[index];
    const Tensor* const tensor = source.Find(name);
    job.tensors.push_back(name);
    job.tensor_bytes += tensor->size_bytes;
    job.arrival = std::max(job.arrival, source.ArrivalOf(tensor - source.tensors().data()));
  }
  jobs.erase(std::remove_if(jobs.begin(), jobs.end(),
                            [](const PackJob& job) { return job.tasks.empty(); }),
             jobs.end());
  for (PackJob& job : jobs) {
    for (const PackTask& task : job.tasks) {
      job.largest_task = std::max(job.largest_task, task.bytes);
    }
  }
  // Of tensors that arrive at the same time the largest come first, so that the threads end
  // together.
  std::stable_sort(jobs.begin(), jobs.end(), [](const PackJob& a, const PackJob& b) {
    return std::pair(a.arrival, b.tensor_bytes) < std::pair(b.arrival, a.tensor_bytes);
  });
  return jobs;
}

// The most tasks that any block has: one for each rank.
size_t NumRanks(const std::vector<PackTask>& tasks) {
  std::map<int, size_t> count;  // by block
  size_t most = 0;
  for (const PackTask& task : tasks) most = std::max(most, ++count[task.block]);
  return most;
}

// How many jobs may run at one time, one on each worker: as many as fit into memory even if they
// are the largest.
size_t NumWorkers(const std::vector<PackJob>& jobs, size_t threads, size_t most) {
  std::vector<size_t> sizes;
  for (const PackJob& job : jobs) {
    sizes.push_back(job.tensor_bytes + threads * job.largest_task);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  size_t bytes = 0;
  size_t count = 0;
  while (count < std::min(sizes.size(), most) && bytes + sizes[count] <= kMaxPackingBytes) {
    bytes += sizes[count++];
  }
  return std::max<size_t>(count, 1);
}

// Memory of one thread, for blocks on their way to the store.
class Scratch {
 public:
  std::byte* Reserve(size_t bytes) {
    if (capacity_ < bytes) {
      memory_.reset();  // free the old memory before allocating the new
      memory_ = AllocateAligned(bytes);
      capacity_ = bytes;
    }
    return memory_.get();
  }

 private:
  AlignedBytes memory_;
  size_t capacity_ = 0;
};

absl::Status Pack(const PackTask& task, const TensorSet& tensors, Scratch& scratch,
                  WeightStore& store) {
  std::byte* const out = task.place != nullptr ? task.place : scratch.Reserve(task.bytes);
  const size_t block_bytes = task.layout->BlockBytes(task.block);
  task.layout->PackBlock(tensors, task.block, out);
  std::memset(out + block_bytes, 0, task.bytes - block_bytes);
  return task.place != nullptr ? absl::OkStatus() : store.Put(task, out);
}

}  // namespace

absl::StatusOr<std::string> PackModel(const TensorSource& source,
                                      const std::string& expected_digest, WeightStore& store,
                                      bool allow_nonfinite) {
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<PackTask> tasks, store.Plan());
  if (tasks.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(CheckpointDigests digests, DigestTensors(source, allow_nonfinite));
    store.KeepDigests(DigestsOfWeights(digests.tensors));
    ISOBIT_RETURN_IF_ERROR(CheckDigest(digests.checkpoint, expected_digest));
    return std::move(digests.checkpoint);
  }
  const std::vector<PackJob> jobs = PackJobsOf(tasks, source);
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t threads = std::min(NumRanks(tasks), cores);  // of each job
  // One job more than there are threads for: some threads idle while a large tensor is hashed.
  const size_t num_workers = NumWorkers(jobs, threads, threads == 1 ? cores : cores / threads + 1);
  size_t total = 0;
  for (const PackTask& task : tasks) total += task.bytes;
  Progress progress(total);
  WeightReader reader(source, allow_nonfinite);
  std::vector<TensorSet> tensors(num_workers);
  std::vector<Scratch> scratch(num_workers * threads);
  ISOBIT_RETURN_IF_ERROR(
      ParallelFor(jobs.size(), num_workers, [&](size_t item, size_t worker) -> absl::Status {
        const PackJob& job = jobs[item];
        ISOBIT_RETURN_IF_ERROR(reader.Read(job.tensors, threads, tensors[worker]));
        ISOBIT_RETURN_IF_ERROR(Failpoint("weights.read"));
        return ParallelFor(job.tasks.size(), threads, [&](size_t t, size_t thread) {
          const PackTask& task = job.tasks[t];
          ISOBIT_RETURN_IF_ERROR(
              Pack(task, tensors[worker], scratch[worker * threads + thread], store));
          progress.Add(task.bytes);
          return absl::OkStatus();
        });
      }));
  ISOBIT_RETURN_IF_ERROR(Failpoint("weights.packed"));
  progress.Finish();
  ISOBIT_ASSIGN_OR_RETURN(CheckpointDigests digests, reader.Finish());
  store.KeepDigests(DigestsOfWeights(digests.tensors));
  return CheckDigests(std::move(digests), tasks.front().layout->plan(), expected_digest);
}

}  // namespace isobit
