// Rows of logits with their sampling parameters for the tests of LogProbs.
#include "tests/kernels/log_prob_cases.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace isobit::testing_support {
namespace {

constexpr float kNotFinite[] = {std::numeric_limits<float>::quiet_NaN(),
                                std::numeric_limits<float>::infinity(),
                                -std::numeric_limits<float>::infinity()};

float MakeLogit(Logits kind, int64_t id, int64_t vocab, Random& random) {
  // A sum of uniforms is normal enough and far cheaper.
  const uint64_t bits = random();
  float normal = -2.0f;
  for (int i = 0; i < 4; ++i) normal += static_cast<float>(bits >> (16 * i) & 0xffff) * 0x1p-16f;
  normal *= 1.73f;
  switch (kind) {
    case Logits::kModel:
      return bits % 1000 == 0 ? 8.0f + 4.0f * normal : 2.5f * normal;
    case Logits::kPeaked:
      return 4.0f * normal;
    case Logits::kFlat:
      return 0.01f * normal;
    case Logits::kTied:
      return std::round(2.0f * normal);
    case Logits::kEqual:
      return -1.25f;
    case Logits::kSteep:
      return 60.0f * normal;
    case Logits::kSignedZeros:
      return bits % 2 == 0 ? 0.0f : -0.0f;
    case Logits::kTiny:
      return std::ldexp(normal, -static_cast<int>(bits % 160));
    case Logits::kHuge:
      return std::ldexp(normal, static_cast<int>(bits % 100));
    case Logits::kAscending:
      return 30.0f * static_cast<float>(id) / static_cast<float>(vocab);
    case Logits::kTwoLevels:
      return bits % 4 == 0 ? 3.0f : std::nextafter(3.0f, 0.0f);
  }
  return 0.0f;
}

}  // namespace

std::vector<float> MakeLogits(Logits kind, int64_t vocab, Random& random) {
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; ++i) {
    logits[static_cast<size_t>(i)] = MakeLogit(kind, i, vocab, random);
  }
  return logits;
}

std::string Describe(const LogProbCase& request) {
  const RowSampling& s = request.sampling;
  return absl::StrCat("vocab ", request.logits.size(), ", temperature ", s.temperature, ", top_k ",
                      s.top_k, ", top_p ", s.top_p, ", min_p ", s.min_p, ", target ",
                      request.target, ", raw ", request.raw, ", top ", request.top_logprobs,
                      ", lists ", request.counts.size(), " ", request.biases.size(), " ",
                      request.banned.size());
}

LogProbCase RandomLogProbCase(int64_t vocab, Random& random) {
  LogProbCase r;
  r.logits = MakeLogits(Pick(kLogitKinds, random), vocab, random);
  RowSampling& s = r.sampling;
  const auto size = static_cast<int32_t>(vocab);
  s.temperature = Pick({1.0f, 1.0f, 0.0f, 0.7f, 1.3f, 0.05f, 1e-4f, 50.0f, 1e20f}, random);
  if (random() % 2 == 0) {
    s.top_k = Pick({0, 1, 2, 20, 200, 600, size / 2, size - 1, size, size + 5}, random);
    s.top_p = Pick({1.0f, 0.9f, 0.5f, 0.999f, 0.01f, 1e-9f, 0x1.fffffep-1f}, random);
    s.min_p = Pick({0.0f, 0.0f, 0.05f, 0.5f, 1.0f, 1e-6f, 1e-30f}, random);
  }
  s.seed = random();
  s.sample = static_cast<uint32_t>(random() % 3);
  s.position = static_cast<uint32_t>(random() % 100000);
  if (random() % 2 == 0) {
    s.repetition_penalty = Pick({1.0f, 1.2f, 0.8f}, random);
    s.presence_penalty = Pick({0.0f, 0.5f, -0.5f}, random);
    s.frequency_penalty = Pick({0.0f, 0.3f, -0.1f}, random);
    const int32_t step = std::max(1, size / static_cast<int32_t>(1 + random() % 300));
    for (int32_t id = static_cast<int32_t>(random() % 7); id < size; id += step) {
      r.counts.push_back({id, static_cast<int32_t>(random() % 4), random() % 2 == 0});
      if (random() % 4 == 0) r.biases.push_back({id, Pick({5.0f, -5.0f, 100.0f, -100.0f}, random)});
      if (random() % 8 == 0 && id + 1 < size && size > 2) {
        r.banned.push_back(id + static_cast<int32_t>(random() % 2));
      }
    }
  }
  if (random() % 16 == 0) {  // all but one token banned
    const auto only = static_cast<int32_t>(random() % vocab);
    r.banned.clear();
    for (int32_t id = 0; id < size; ++id) {
      if (id != only) r.banned.push_back(id);
    }
  }
  if (random() % 3 == 0) r.target = static_cast<int32_t>(random() % vocab);
  r.raw = random() % 4 == 0;
  r.want_entropy = random() % 2 == 0;
  r.top_logprobs = Pick({0, 0, 0, 1, 5, 20, 64}, random);
  if (random() % 40 == 0) r.logits[random() % vocab] = Pick(kNotFinite, random);
  return r;
}

std::vector<LogProbCase> EveryFilter(Logits kind, int64_t vocab, Random& random) {
  std::vector<LogProbCase> requests;
  for (const int32_t top_k : {0, 1, 5, 300, 1500, 4000}) {
    for (const float top_p : {1.0f, 0.999f, 0.8f, 0.1f}) {
      for (const float min_p : {0.0f, 0.02f}) {
        LogProbCase r;
        r.logits = MakeLogits(kind, vocab, random);
        r.sampling.top_k = top_k;
        r.sampling.top_p = top_p;
        r.sampling.min_p = min_p;
        r.sampling.seed = random();
        r.top_logprobs = 3;
        requests.push_back(std::move(r));
      }
    }
  }
  return requests;
}

std::vector<LogProbCase> NonFiniteCases(Random& random, size_t* num_sound) {
  std::vector<LogProbCase> requests;
  for (const float bad : kNotFinite) {
    for (const size_t at : {size_t{0}, size_t{99}, size_t{700}, size_t{999}}) {
      for (const bool raw : {false, true}) {
        LogProbCase r;
        r.logits = MakeLogits(Logits::kPeaked, 1000, random);
        r.logits[at] = bad;
        r.raw = raw;
        r.banned = {static_cast<int32_t>(at)};  // must not hide it
        r.top_logprobs = static_cast<int32_t>(at % 2);
        requests.push_back(std::move(r));
      }
    }
  }
  const auto add = [&](float value, auto change) {
    LogProbCase r;
    r.logits.assign(1000, value);
    change(r);
    requests.push_back(std::move(r));
  };
  add(1e30f, [](LogProbCase& r) { r.sampling.temperature = 1e-10f; });
  add(1e30f, [](LogProbCase& r) { r.sampling.temperature = 1e-10f, r.sampling.top_k = 3; });
  add(0.0f, [](LogProbCase& r) { r.sampling.temperature = 1e-40f; });
  add(-1.0f, [](LogProbCase& r) { r.sampling.temperature = 1e-40f; });
  add(1.0f, [](LogProbCase& r) {
    for (int32_t id = 0; id < 1000; ++id) r.banned.push_back(id);
  });
  add(1.0f, [](LogProbCase& r) { r.biases = {{5, kNotFinite[0]}}; });
  add(1.0f, [](LogProbCase& r) { r.biases = {{5, kNotFinite[1]}}; });
  const size_t num_bad = requests.size();
  add(1.0f, [](LogProbCase& r) { r.biases = {{5, kNotFinite[2]}}; });
  add(-1e30f, [](LogProbCase& r) {  // most overflow to -inf: filtered out
    r.sampling.temperature = 1e-10f;
    r.logits[3] = 1.0f;
  });
  *num_sound = requests.size() - num_bad;
  return requests;
}

void AppendBits(const TokenLogProb& token, RowBits* bits) {
  bits->push_back(static_cast<uint32_t>(token.id));
  bits->push_back(std::bit_cast<uint32_t>(token.logprob));
}

std::vector<RowBits> RunLogProbs(const std::vector<LogProbCase>& cases, const float* logits,
                                 int64_t ld,
                                 absl::FunctionRef<absl::Status(const LogProbsArgs& args)> run) {
  std::vector<LogProbRequest> requests;
  std::vector<LogProbResult> results;
  for (const LogProbCase& c : cases) {
    requests.push_back({.sampling = c.sampling,
                        .target = c.target,
                        .raw = c.raw,
                        .top_logprobs = c.top_logprobs,
                        .want_entropy = c.want_entropy});
    requests.back().sampling.counts = c.counts;
    requests.back().sampling.biases = c.biases;
    requests.back().sampling.banned = c.banned;
    results.push_back({.token = kUnset, .top = {}, .entropy = kUnset.logprob});
  }
  const absl::Status status = run({.logits = logits,
                                   .ld = ld,
                                   .requests = requests.data(),
                                   .results = results.data(),
                                   .num_rows = static_cast<int64_t>(cases.size()),
                                   .vocab = static_cast<int64_t>(cases.front().logits.size())});
  EXPECT_TRUE(status.ok()) << status;
  std::vector<RowBits> all;
  for (const LogProbResult& result : results) {
    RowBits bits = {static_cast<uint32_t>(result.finite), std::bit_cast<uint32_t>(result.entropy)};
    AppendBits(result.token, &bits);
    for (const TokenLogProb& token : result.top) AppendBits(token, &bits);
    all.push_back(std::move(bits));
  }
  return all;
}

std::vector<RowBits> RunLogProbs(Backend& ops, const std::vector<LogProbCase>& cases) {
  std::vector<float> logits;
  for (const LogProbCase& c : cases) logits.insert(logits.end(), c.logits.begin(), c.logits.end());
  return RunLogProbs(cases, logits.data(), static_cast<int64_t>(cases.front().logits.size()),
                     [&ops](const LogProbsArgs& args) { return ops.Run(args); });
}

}  // namespace isobit::testing_support
