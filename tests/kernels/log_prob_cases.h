// Shared by the tests of LogProbs: rows of every kind under every parameter, and how a backend runs
// on them. Not here: what a backend is compared with.
#ifndef ISOBIT_TESTS_KERNELS_LOG_PROB_CASES_H_
#define ISOBIT_TESTS_KERNELS_LOG_PROB_CASES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/backend.h"
#include "kernels/ops/log_probs.h"
#include "tests/kernels/cpu/op_cases.h"

namespace isobit::testing_support {

template <typename T, size_t kSize>
T Pick(const T (&choices)[kSize], Random& random) {
  return choices[random() % kSize];
}

enum class Logits {
  kModel,  // like a language model's: most logits close together, some far above them
  kPeaked,
  kFlat,
  kTied,
  kEqual,
  kSteep,
  kSignedZeros,
  kTiny,       // exponents far below 0 of either sign
  kHuge,       // exponents far above 0
  kAscending,  // each range is above the one before it; the maximum comes last
  kTwoLevels,  // two values, one token apart from a quarter of the row
};
inline constexpr Logits kLogitKinds[] = {Logits::kModel,       Logits::kPeaked,   Logits::kFlat,
                                         Logits::kTied,        Logits::kEqual,    Logits::kSteep,
                                         Logits::kSignedZeros, Logits::kTiny,     Logits::kHuge,
                                         Logits::kAscending,   Logits::kTwoLevels};
std::vector<float> MakeLogits(Logits kind, int64_t vocab, Random& random);

// One row: its logits and the request. Owns what RowSampling points to.
struct LogProbCase {
  RowSampling sampling;
  std::vector<TokenCount> counts;
  std::vector<TokenBias> biases;
  std::vector<int32_t> banned;
  std::vector<float> logits;
  int32_t target = -1;
  bool raw = false;
  bool want_entropy = true;
  int32_t top_logprobs = 0;
};
std::string Describe(const LogProbCase& row);

// Cases with random parameters; one in forty has a logit that is not finite.
LogProbCase RandomLogProbCase(int64_t vocab, Random& random);
// Every combination of some values of the three filters.
std::vector<LogProbCase> EveryFilter(Logits kind, int64_t vocab, Random& random);
// Rows that are no distribution, then *num_sound valid rows that look as if they were none.
std::vector<LogProbCase> NonFiniteCases(Random& random, size_t* num_sound);

// The value of outputs that were not written.
inline constexpr TokenLogProb kUnset = {-7, -7.0f};

// All outputs of a row: finite, entropy, then ids and logprobs of the token and of the top list.
using RowBits = std::vector<uint32_t>;
void AppendBits(const TokenLogProb& token, RowBits* bits);

// The outputs of `run` on the cases. logits: [cases, columns], leading dimension ld, in the
// backend's memory.
std::vector<RowBits> RunLogProbs(const std::vector<LogProbCase>& cases, const float* logits,
                                 int64_t ld,
                                 absl::FunctionRef<absl::Status(const LogProbsArgs& args)> run);
// The same for a backend in host memory.
std::vector<RowBits> RunLogProbs(Backend& ops, const std::vector<LogProbCase>& cases);

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_LOG_PROB_CASES_H_
