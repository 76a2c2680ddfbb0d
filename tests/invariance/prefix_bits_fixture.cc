// The requests, the engine and the comparison.
#include "tests/invariance/prefix_bits_fixture.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/runtime/host_executor.h"
#include "tests/invariance/service_bits_fixture.h"
#include "tests/invariance/tiny_models.h"
#include "tests/support/status_matchers.h"

namespace isobit::invariance {
namespace {

class Collector final : public RequestSink {
 public:
  explicit Collector(uint32_t n) : samples(n) {}
  void OnToken(uint32_t sample, SampledToken token) override {
    samples[sample].tokens.push_back(token.id);
    samples[sample].logprobs.push_back(std::bit_cast<uint32_t>(token.logprob));
  }
  void OnSampleEnd(uint32_t sample, SampleEnd end) override {
    samples[sample].num_cached = end.num_cached_prompt_tokens;
    samples[sample].num_preemptions = end.num_preemptions;
    samples[sample].reason = end.reason;
  }
  void OnDone(const absl::Status& status) override { outcome = status; }

  PrefixSamples samples;
  std::optional<absl::Status> outcome;
};

template <typename Visit>
void ForEachSample(const std::vector<PrefixSamples>& all, const Visit& visit) {
  for (const PrefixSamples& samples : all) std::for_each(samples.begin(), samples.end(), visit);
}

}  // namespace

uint32_t MostCached(const std::vector<PrefixSamples>& all) {
  uint32_t most = 0;
  ForEachSample(all, [&](const PrefixSample& s) { most = std::max(most, s.num_cached); });
  return most;
}

uint32_t Preemptions(const std::vector<PrefixSamples>& all) {
  uint32_t sum = 0;
  ForEachSample(all, [&](const PrefixSample& s) { sum += s.num_preemptions; });
  return sum;
}

PrefixBitsFixture::PrefixBitsFixture() {
  TinyModelDirectory(GetParam());
  config_ = *LoadModelConfig(TinyModelDirectory(GetParam()));
}

std::unique_ptr<Engine> PrefixBitsFixture::MakeEngine(const PrefixSetup& setup) const {
  EngineOptions options;
  options.model_root = TinyModelRoot();
  options.runner = {
      .tensor_parallel_size = setup.tp_size,
      .mode = setup.mode,
      .page_size = setup.page_size,
      .num_pages = setup.num_pages,
      .max_positions = std::min<int64_t>(setup.max_positions, config_.max_position_embeddings),
      .make_rank = setup.make_rank != nullptr ? setup.make_rank : MakeHostRank([mode = setup.mode] {
        return MakeCpuBackend({.mode = mode});
      })};
  options.scheduler = {.max_running = setup.max_running,
                       .max_batch_tokens = setup.max_batch_tokens,
                       .share_prefixes = setup.share};
  options.prefix_cache_fraction = setup.cache_fraction;
  return ServeTinyModel(config_, options, GetParam());
}

GenerationRequest PrefixBitsFixture::Group(uint32_t length, uint32_t n) const {
  GenerationRequest request;
  request.id = absl::StrCat("n", n, " of ", length);
  // Prompts of even length begin alike, and so do those of odd length.
  for (uint32_t j = 0; j < length; ++j) {
    request.prompt.push_back(static_cast<int32_t>((length % 2 * 131 + j * 71 + j * j) %
                                                  static_cast<uint32_t>(config_.vocab_size)));
  }
  request.sampling.seed = 1000 + length;
  request.sampling.n = n;
  request.sampling.max_tokens = 5 + length % 4;
  request.sampling.ignore_eos = true;
  request.sampling.temperature = length == 5 ? 0.0f : 0.5f + 0.1f * static_cast<float>(length % 7);
  if (length % 4 == 1) request.sampling.top_p = 0.9f;
  if (length % 5 == 0) request.sampling.frequency_penalty = 0.5f;
  return request;
}

std::vector<GenerationRequest> PrefixBitsFixture::Groups(uint32_t n) const {
  std::vector<GenerationRequest> requests;
  for (const uint32_t length : {1u, 3u, 4u, 5u, 15u, 16u, 17u, 31u, 33u, 64u}) {
    requests.push_back(Group(length, n));
  }
  return requests;
}

std::vector<GenerationRequest> PrefixBitsFixture::LongGroups(uint32_t n) const {
  std::vector<GenerationRequest> requests;
  for (const uint32_t length : {511u, 512u, 513u, 1024u, 1041u}) {
    if (length + 32 <= static_cast<uint32_t>(config_.max_position_embeddings)) {
      requests.push_back(Group(length, n));
    }
  }
  return requests;
}

GenerationRequest PrefixBitsFixture::NextTurn(const GenerationRequest& request,
                                              const PrefixSamples& samples) const {
  GenerationRequest next = request;
  next.id = absl::StrCat(request.id, ", next turn");
  const std::vector<int32_t>& said = samples.front().tokens;
  next.prompt.insert(next.prompt.end(), said.begin(), said.end());
  for (const int32_t id : {7, 3, 11}) next.prompt.push_back(id % config_.vocab_size);
  return next;
}

std::vector<PrefixSamples> PrefixBitsFixture::Run(Engine& engine,
                                                  const std::vector<GenerationRequest>& requests) {
  std::vector<std::shared_ptr<Collector>> sinks;
  for (const GenerationRequest& request : requests) {
    sinks.push_back(std::make_shared<Collector>(request.sampling.n));
    ISOBIT_EXPECT_OK(engine.Submit(request, sinks.back()).status());
  }
  while (engine.Step()) {
  }
  std::vector<PrefixSamples> all;
  for (const auto& sink : sinks) {
    EXPECT_EQ(sink->outcome, absl::OkStatus());
    all.push_back(sink->samples);
  }
  EXPECT_EQ(engine.load().num_used_pages, 0);
  return all;
}

const std::vector<PrefixSamples>& PrefixBitsFixture::Alone(
    const std::vector<GenerationRequest>& requests) {
  std::string ids;
  for (const GenerationRequest& request : requests) absl::StrAppend(&ids, request.id, ";");
  const auto [entry, added] = alone_.try_emplace(ids);
  if (added) {
    const auto engine = MakeEngine({.share = false, .max_positions = 2048});
    for (const GenerationRequest& request : requests) {
      entry->second.push_back(Run(*engine, {request}).front());
    }
    EXPECT_EQ(MostCached(entry->second), 0u);
  }
  return entry->second;
}

void PrefixBitsFixture::ExpectTheBitsOfAlone(const PrefixSetup& setup,
                                             const std::vector<GenerationRequest>& requests) {
  const auto engine = MakeEngine(setup);
  EXPECT_EQ(Run(*engine, requests), Alone(requests)) << "cold";
  EXPECT_EQ(Run(*engine, requests), Alone(requests)) << "warm";
  std::vector<GenerationRequest> turns;
  for (size_t i = 0; i < requests.size(); ++i) {
    turns.push_back(NextTurn(requests[i], Alone(requests)[i]));
  }
  EXPECT_EQ(Run(*engine, turns), Alone(turns)) << "the next turns";
}

}  // namespace isobit::invariance
