// A request table without an engine. Its sinks are called at once.
#ifndef ISOBIT_TESTS_ROLLOUT_ENGINE_REQUEST_TABLE_FIXTURE_H_
#define ISOBIT_TESTS_ROLLOUT_ENGINE_REQUEST_TABLE_FIXTURE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "rollout/engine/emitter.h"
#include "rollout/engine/request_table.h"
#include "tests/rollout/engine/engine_fixture.h"

namespace isobit {

class RequestTableFixture : public testing::Test {
 protected:
  using Clock = RequestTable::Clock;
  static constexpr int64_t kMaxWaitingTokens = 40;

  static SamplingParams MaxTokens(uint32_t max_tokens) {
    SamplingParams params;
    params.max_tokens = max_tokens;
    return params;
  }
  static SamplingParams Samples(uint32_t n) {
    SamplingParams params;
    params.n = n;
    return params;
  }

  // Queues a request of five prompt tokens.
  std::shared_ptr<RecordingSink> Add(const std::string& id, SamplingParams sampling = {},
                                     const std::string& client = "",
                                     std::optional<std::chrono::milliseconds> timeout = {}) {
    auto sink = std::make_shared<RecordingSink>();
    if (sampling.max_tokens == 0) sampling.max_tokens = 8;
    GenerationRequest request = {.id = id,
                                 .prompt = {3, 14, 15, 92, 65},
                                 .sampling = std::move(sampling),
                                 .timeout = timeout,
                                 .client = client};
    last_ticket_ = table_.Add(std::make_unique<Request>(std::move(request), 11, sink));
    return sink;
  }

  // The first sequence of the next step, ready for a token.
  Sequence& Schedule() {
    batch_ = table_.scheduler().Schedule().sequences;
    EXPECT_FALSE(batch_.empty());
    for (Sequence* sequence : batch_) {
      sequence->request->BeginSampling(*sequence, {});
      sequence->num_cached = static_cast<int64_t>(sequence->tokens.size());
    }
    return *batch_.front();
  }

  void Commit(Sequence& sequence, LogProbResult result) {
    sequence.num_pending = 1;
    table_.CommitDraws(sequence, {&result, 1});
    Sequence* const committed = &sequence;
    table_.CloseFinished({&committed, 1});
    Deliver();
  }
  void Commit(Sequence& sequence, int32_t token) {
    LogProbResult result;
    result.token = {.id = token, .logprob = -1.0f};
    Commit(sequence, std::move(result));
  }

  void EndDue(Clock::time_point now) {
    table_.EndDue(now);
    Deliver();
  }

  void Deliver() { emitter_.Emit(outbox_); }

  std::shared_ptr<const WeightVersion> version_ =
      std::make_shared<const WeightVersion>(WeightVersion{3, ""});
  std::vector<Emission> outbox_;
  RequestTable table_{{.max_running = 4, .max_batch_tokens = 64, .share_prefixes = false},
                      {.max_waiting_requests = 2, .max_waiting_tokens = kMaxWaitingTokens},
                      {.num_pages = 32, .page_size = 4},
                      version_,
                      outbox_};
  std::vector<Sequence*> batch_;
  uint64_t last_ticket_ = 0;

 private:
  Emitter emitter_;
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_ENGINE_REQUEST_TABLE_FIXTURE_H_
