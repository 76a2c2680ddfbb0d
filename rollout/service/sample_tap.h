// The tap: copies finished samples to readers that compare them, and delays no request for it.
//
// Without a reader, a request costs one read of an atomic number. With readers, the tokens of
// chosen samples are copied as they come, within a bound on memory. Samples for which there is no
// room, here or in a slow reader's queue, are dropped and counted.
#ifndef ISOBIT_ROLLOUT_SERVICE_SAMPLE_TAP_H_
#define ISOBIT_ROLLOUT_SERVICE_SAMPLE_TAP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/access/held_bytes.h"
#include "common/metrics/metrics.h"
#include "common/rpc/stream_writer.h"
#include "isobit/v1/rollout.pb.h"

namespace isobit {

// Thread-safe.
class SampleTap {
 public:
  static constexpr size_t kMaxReaders = 4;
  static constexpr size_t kMaxTokenBytes = 64 << 20;  // of chosen samples that are not finished
  static constexpr size_t kMaxQueuedBytes = 8 << 20;  // per reader, written but not yet read

  explicit SampleTap(Metrics& metrics);

  // A reader's call. It ends with INVALID_ARGUMENT, with RESOURCE_EXHAUSTED, or at Close with
  // UNAVAILABLE.
  grpc::ServerWriteReactor<v1::TappedSample>* Open(grpc::CallbackServerContext* context,
                                                   const v1::TapRequest& request);

  // Ends all calls, and refuses new ones.
  void Close();

  // Whether there is a reader.
  bool is_open() const { return threshold_.load(std::memory_order_relaxed) > 0; }
  // Whether a reader wants the sample.
  bool Wants(const std::string& request_id, uint32_t index) const;

  // Gives `sample` to its readers. Never blocks.
  void Offer(const v1::TappedSample& sample);
  // Counts a chosen sample that cannot be offered.
  void CountDropped() { dropped_.Increment(); }
  void CountSkipped() { skipped_.Increment(); }

  // The memory of the chosen samples of one request.
  HeldBytes OpenTokens() { return tokens_->Open("tap"); }

 private:
  using Writer = StreamWriter<v1::TappedSample>;
  struct Reader {
    uint64_t threshold;
    std::shared_ptr<Writer> writer;
  };

  absl::Status CheckOpen(const v1::TapRequest& request) const;  // holds mutex_
  void Forget(const std::shared_ptr<const Writer*>& writer);
  void UpdateThreshold();  // holds mutex_

  const std::shared_ptr<ByteBudget> tokens_;
  prometheus::Counter& sent_;
  prometheus::Counter& dropped_;
  prometheus::Counter& skipped_;
  std::atomic<uint64_t> threshold_ = 0;  // the highest of all readers

  std::mutex mutex_;
  bool closed_ = false;          // guarded by mutex_
  std::vector<Reader> readers_;  // guarded by mutex_
};

// The chosen samples of one request, as they grow. Not thread-safe.
class TappedRequest {
 public:
  // `tap` outlives it. Copies prompt, sampling parameters and id out of `request`.
  TappedRequest(SampleTap& tap, const std::string& request_id, const v1::GenerateRequest& request);

  void AddToken(uint32_t sample, int32_t token_id, float logprob, uint64_t weight_version);
  // Offers the sample if it was chosen.
  void End(const v1::GenerateComplete& complete);

 private:
  SampleTap& tap_;
  v1::TappedSample origin_;  // without tokens and complete
  HeldBytes held_;
  size_t num_tokens_ = 0, num_held_ = 0;
  std::vector<v1::TokenLogprobs> tokens_;  // by sample
  std::vector<bool> is_chosen_;            // likewise
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_SAMPLE_TAP_H_
