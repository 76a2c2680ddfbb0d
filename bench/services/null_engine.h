// An engine over ranks that compute nothing, and requests for it: for what the rollout's host code
// costs.
#ifndef ISOBIT_BENCH_SERVICES_NULL_ENGINE_H_
#define ISOBIT_BENCH_SERVICES_NULL_ENGINE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "rollout/engine/engine.h"

namespace isobit::bench {

inline constexpr int64_t kNullContext = 1 << 17;  // tokens of a sequence, at most

struct NullEngineOptions {
  int tensor_parallel_size = 1;
  size_t max_running = 1;
  std::chrono::microseconds step_time{0};
  bool time_steps = true;
};

// Steps until the engine has the weights of the directory, its first.
absl::Status LoadFirstWeights(Engine& engine, const std::string& model_path);

// The engine, its empty model's directory, and its first weights.
class NullEngine {
 public:
  static absl::StatusOr<std::unique_ptr<NullEngine>> Create(const NullEngineOptions& options);
  ~NullEngine();
  Engine& operator*() { return *engine_; }
  Engine* operator->() { return engine_.get(); }

  std::atomic<uint64_t> num_rows{0};  // rows that the ranks have computed

 private:
  NullEngine();

  std::string directory_;
  std::unique_ptr<Engine> engine_;
};

// Counts the results of all requests together.
struct Counts {
  std::atomic<uint64_t> tokens{0};
  std::atomic<uint64_t> messages{0};
  std::atomic<uint64_t> started{0};  // requests that have a token
  std::atomic<uint64_t> done{0};
};

class CountingSink : public RequestSink {
 public:
  explicit CountingSink(Counts& counts) : counts_(counts) {}
  void OnToken(uint32_t /*sample*/, SampledToken /*token*/) override {
    counts_.tokens.fetch_add(1, std::memory_order_relaxed);
  }
  void OnSampleEnd(uint32_t /*sample*/, SampleEnd /*end*/) override {}
  void OnDone(const absl::Status& /*status*/) override { ++counts_.done; }

 private:
  Counts& counts_;
};

// Requests that are submitted anew as they end.
class Load {
 public:
  using MakeSink = std::function<std::shared_ptr<RequestSink>(Counts& counts)>;

  Load(
      Engine& engine, int64_t prompt, uint32_t max_tokens,
      MakeSink make_sink = [](Counts& counts) { return std::make_shared<CountingSink>(counts); });

  // Submits until `streams` are in flight.
  void Fill(size_t streams);

  Counts counts;

 private:
  Engine& engine_;
  const int64_t prompt_;
  const uint32_t max_tokens_;
  const MakeSink make_sink_;
  uint64_t submitted_ = 0;
};

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_SERVICES_NULL_ENGINE_H_
