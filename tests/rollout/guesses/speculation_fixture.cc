// The requests and the comparison.
#include "tests/rollout/guesses/speculation_fixture.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing_support::BitwiseEqual;

bool SameTop(const std::vector<TokenLogProb>& a, const std::vector<TokenLogProb>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const TokenLogProb& x, const TokenLogProb& y) {
                      return x.id == y.id && BitwiseEqual(x.logprob, y.logprob);
                    });
}

bool SameEnd(const SampleEnd& a, const SampleEnd& b) {
  return a.reason == b.reason && a.stop_token == b.stop_token &&
         a.num_prompt_tokens == b.num_prompt_tokens &&
         a.num_completion_tokens == b.num_completion_tokens && a.seed == b.seed &&
         a.weight_version.id == b.weight_version.id;
}

}  // namespace

std::vector<GenerationRequest> SpeculationFixture::AllParameters(uint32_t n,
                                                                 uint32_t max_tokens) const {
  std::vector<GenerationRequest> requests;
  const auto add = [&](const std::string& id, const std::function<void(GenerationRequest&)>& set) {
    GenerationRequest request = MakeRequest(id, 11 + requests.size());
    request.sampling.n = n;
    request.sampling.max_tokens = max_tokens;
    set(request);
    requests.push_back(std::move(request));
  };
  add("plain", [](GenerationRequest&) {});
  add("greedy", [](GenerationRequest& r) { r.sampling.temperature = 0.0f; });
  add("cold, top lists", [](GenerationRequest& r) {
    r.sampling.temperature = 0.6f;
    r.sampling.logprobs = 4;
  });
  add("top_k", [](GenerationRequest& r) { r.sampling.top_k = 7; });
  add("top_p", [](GenerationRequest& r) { r.sampling.top_p = 0.8f; });
  add("min_p, raw", [](GenerationRequest& r) {
    r.sampling.min_p = 0.1f;
    r.raw_logprobs = true;
    r.sampling.logprobs = 2;
  });
  add("penalties", [](GenerationRequest& r) {
    r.sampling.repetition_penalty = 1.3f;
    r.sampling.presence_penalty = 0.4f;
    r.sampling.frequency_penalty = 0.7f;
    r.sampling.top_k = 9;
    r.sampling.temperature = 0.7f;
  });
  add("bias", [](GenerationRequest& r) {
    r.sampling.logit_bias = {{5, 4.0f}, {17, 3.0f}, {40, -100.0f}};
  });
  // The few likely tokens come often, so that some stop a sample: in the first draw of a step, in
  // one behind a guess, and before min_tokens not at all.
  add("stops", [](GenerationRequest& r) {
    r.sampling.logit_bias = {{5, 5.0f}, {17, 5.0f}, {33, 5.0f}};
    r.sampling.stop_token_ids = {33};
  });
  add("min_tokens", [max_tokens](GenerationRequest& r) {
    r.sampling.logit_bias = {{5, 5.0f}, {17, 5.0f}, {33, 5.0f}};
    r.sampling.stop_token_ids = {33, 17};
    r.sampling.min_tokens = max_tokens / 2;
    r.sampling.ignore_eos = false;
  });
  return requests;
}

std::vector<GenerationRequest> SpeculationFixture::FirstWithGuesses(int with_guesses, int all,
                                                                    uint32_t max_tokens) const {
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < all; ++i) {
    requests.push_back(MakeRequest(absl::StrCat(i), static_cast<uint64_t>(i)));
    requests.back().sampling.max_tokens = max_tokens;
    requests.back().speculate = i < with_guesses;
  }
  return requests;
}

Results SpeculationFixture::RunAll(const EngineOptions& options,
                                   const std::vector<GenerationRequest>& requests,
                                   const Disturb& disturb) const {
  const auto engine = MakeEngine(options);
  Results results;
  for (const GenerationRequest& request : requests) results.push_back(Submit(*engine, request));
  const auto runs = [&] {
    return std::ranges::any_of(results, [](const auto& sink) { return !sink->done; });
  };
  for (int step = 0; runs(); ++step) {
    if (disturb) disturb(*engine, step);
    engine->Step();
  }
  EXPECT_EQ(engine->load().num_used_pages, 0);
  EXPECT_EQ(engine->load().num_waiting_tokens, 0);
  return results;
}

std::shared_ptr<const Script> SpeculationFixture::ScriptOf(
    const std::vector<GenerationRequest>& requests, const Results& results) {
  auto script = std::make_shared<Script>();
  for (size_t r = 0; r < requests.size(); ++r) {
    for (const auto& [sample, result] : results[r]->samples) {
      (*script)[{requests[r].id, sample}] = result.tokens;
    }
  }
  return script;
}

void SpeculationFixture::Compare(const Results& expected, const Results& actual, Comparison& sum) {
  for (size_t r = 0; r < expected.size(); ++r) {
    EXPECT_EQ(expected[r]->done, actual[r]->done);
    for (const auto& [sample, a] : expected[r]->samples) {
      const SampleResult& b = actual[r]->samples[sample];
      sum.other_ends += a.end && b.end && SameEnd(*a.end, *b.end) ? 0 : 1;
      sum.tokens += static_cast<int64_t>(a.tokens.size());
      for (size_t i = 0; i < a.tokens.size(); ++i) {
        const bool same = i < b.tokens.size() && a.tokens[i] == b.tokens[i] &&
                          BitwiseEqual(a.logprobs[i], b.logprobs[i]) &&
                          a.versions[i] == b.versions[i] && SameTop(a.top[i], b.top[i]);
        sum.different += same ? 0 : 1;
      }
      if (!b.end) continue;
      sum.draft_tokens += b.end->num_draft_tokens;
      sum.accepted += b.end->num_accepted_tokens;
    }
  }
}

}  // namespace isobit
