// What a client asks for and gets back, and what the engine keeps for it: a Request with n
// Sequences. No gRPC here, and no threads.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_REQUEST_H_
#define ISOBIT_ROLLOUT_SCHEDULE_REQUEST_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/checkpoint/opened_model.h"
#include "common/config/sampling_params.h"
#include "kernels/model/sampling.h"
#include "kernels/ops/log_probs.h"
#include "rollout/schedule/state_pool.h"

namespace isobit {

struct GenerationRequest {
  std::string id;               // unique among those in flight
  std::vector<int32_t> prompt;  // token ids
  SamplingParams sampling;
  bool raw_logprobs = false;  // of the model's own distribution, before any sampling parameter
  std::optional<std::chrono::milliseconds> timeout;  // after it, the request ends with what it has
  std::string client{};                              // the client's name, for Engine::Abort
  // Texts, one after the other, that samples may repeat, for drafters. They need not be right.
  std::vector<int32_t> draft_tokens{};
  std::vector<uint32_t> draft_lengths{};  // of each text; empty: there is one text
  bool speculate = true;                  // false: no guesses for this request
  // Whether the tokens must have the promised bits. If not, a provisional step may draw them.
  bool deterministic = true;
};

// The bounds that every request must keep.
struct RequestLimits {
  SamplingLimits sampling;
  int64_t context_length = 0;    // tokens of one sequence
  int64_t max_batch_tokens = 0;  // tokens of one step, hence of one prefill
  int64_t kv_tokens = 0;         // tokens in all KV pages
};

// INVALID_ARGUMENT, naming field, value and bound: the id exceeds 256 bytes; the prompt is empty; a
// token id is outside the vocabulary; ValidateSamplingParams fails; prompt + max_tokens exceed a
// limit; there are more draft tokens than the samples may have; timeout is not in [1 ms, 7 days].
absl::Status ValidateRequest(const GenerationRequest& request, const RequestLimits& limits);

// The memory that the engine keeps for a waiting request.
size_t BytesOf(const GenerationRequest& request);

enum class FinishReason { kStop, kLength, kAbort };

struct SampledToken {
  int32_t id = 0;
  float logprob = 0.0f;  // finite
  uint64_t weight_version = 0;
  std::vector<TokenLogProb> top{};  // most likely first
};

struct SampleEnd {
  FinishReason reason = FinishReason::kAbort;
  std::optional<int32_t> stop_token{};  // with kStop
  std::string abort_reason{};           // with kAbort, for people
  uint32_t num_prompt_tokens = 0;
  uint32_t num_completion_tokens = 0;
  uint64_t seed = 0;
  WeightVersion weight_version{};  // that made the last token
  uint32_t num_preemptions = 0;
  uint32_t num_cached_prompt_tokens = 0;  // found in the cache when the sample first ran
  uint32_t num_draft_tokens = 0;          // guesses that steps computed for it
  uint32_t num_accepted_tokens = 0;       // tokens that right guesses brought it
};

// Where a request's results go. One thread calls all sinks, so they must not block. The calls:
// OnToken and one OnSampleEnd for each sample, with samples interleaved, then OnDone once. Only
// Flush may be called after OnDone. After an error some samples may lack their OnSampleEnd.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  virtual void OnToken(uint32_t sample, SampledToken token) = 0;
  // Called after the OnToken calls of one or more steps, when no more are waiting.
  virtual void Flush() {}
  virtual void OnSampleEnd(uint32_t sample, SampleEnd end) = 0;
  virtual void OnDone(const absl::Status& status) = 0;
};

struct Request;

// One of a request's n samples. The scheduler moves it between queue and batch. Once it is queued,
// only the engine thread changes it; it plans steps without holding the engine's mutex.
struct Sequence {
  enum class Phase { kWaiting, kRunning, kFinished };

  Request* request = nullptr;
  uint32_t sample = 0;
  Phase phase = Phase::kWaiting;
  std::vector<int32_t> tokens;                   // prompt and completion
  std::unique_ptr<SequenceSampling> sampling{};  // from its first step to its end
  SequenceState state{};
  int64_t num_cached = 0;  // tokens whose keys and values are in `state`, or will be once the steps
                           // in flight have ended; without guesses
  uint32_t num_pending = 0;  // tokens after `tokens` that steps in flight draw, guesses or not
  int32_t last_draw = 0;     // index of its draw in the last step that drew for it
  // Guesses that the step in flight computes behind `tokens`; each has its own draw. A sequence
  // with guesses takes part in no other step in flight.
  std::vector<int32_t> guesses{};
  // Of a deterministic request: the tokens that provisional steps have drawn behind `tokens`. Their
  // keys and values are in the pages. They become guesses, so that a step of the contract computes
  // them again and draws what is right.
  std::vector<int32_t> candidates{};
  uint32_t num_pending_candidates = 0;  // those of num_pending that will be candidates
  bool candidates_end = false;          // no candidate may follow
  bool guesses_were_candidates = false;
  // Of another request: so many tokens at its start have keys and values of the contract.
  int64_t num_exact = INT64_MAX;
  // What its guesser has decided for the next step.
  enum class Turn {
    kGoesOn,
    kAwaitsDraft,  // waits for its pending token, because guesses will probably follow it
    kHeld,         // computes nothing until its candidates are verified
  };
  Turn turn = Turn::kGoesOn;
  size_t drafter = 0;             // the one that made `guesses`
  std::shared_ptr<void> draft{};  // what its guesser keeps, from its first guess to its end
  uint64_t arrival = 0;           // ascending in the order of Scheduler::Add
  uint32_t num_preemptions = 0;
  uint32_t num_cached_prompt_tokens = 0;           // found in the cache at its first step
  uint32_t num_draft_tokens = 0;                   // as in SampleEnd
  uint32_t num_accepted_tokens = 0;                // likewise
  std::shared_ptr<const WeightVersion> weights{};  // of the last token; null: no token yet
};

struct Request {
  // `seed`: the one to use. `request` has passed ValidateRequest.
  Request(GenerationRequest request, uint64_t seed, std::shared_ptr<RequestSink> sink);
  Request(const Request&) = delete;  // sequences point to it
  Request& operator=(const Request&) = delete;

  // Makes the sampling state of one sample, which has no completion yet. Call it at the sample's
  // first step, not before: a waiting request should not keep n copies of a long bias list.
  // eos_token_ids: the model's.
  void BeginSampling(Sequence& sequence, absl::Span<const int32_t> eos_token_ids) const;

  // The text that the sample may repeat, or nothing.
  absl::Span<const int32_t> DraftOf(uint32_t sample) const;

  const std::string id;
  const std::string client;
  const uint32_t num_prompt_tokens;
  const uint32_t max_tokens;
  const uint32_t logprobs;  // alternatives to return at each position
  const bool raw_logprobs;
  const uint64_t seed;
  const SamplingParams sampling;
  const std::vector<int32_t> draft_tokens;
  const std::vector<uint32_t> draft_lengths;
  const bool speculate;
  const bool deterministic;
  const std::chrono::steady_clock::time_point expiry;  // max() without a timeout
  const std::shared_ptr<RequestSink> sink;
  std::vector<std::unique_ptr<Sequence>> samples;

  // Once queued, only the engine thread uses these. Exception: the engine's mutex guards
  // abort_reason.
  size_t num_unfinished;
  size_t num_waiting = 0;    // samples in the scheduler's queue
  uint64_t ticket = 0;       // by which the engine finds it
  std::string abort_reason;  // not empty: end the request before the next step
  absl::Status failure;      // if it is an error, close the request with it
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_REQUEST_H_
