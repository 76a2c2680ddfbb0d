// Golden bits: digests of logits, logprobs and draws for fixed models and tokens, computed on a
// CPU. Every kernel, on any device, is held to them; a change of golden.json is a new contract
// version.
#ifndef ISOBIT_TESTS_INVARIANCE_GOLDEN_H_
#define ISOBIT_TESTS_INVARIANCE_GOLDEN_H_

#include <string>
#include <vector>

#include "kernels/ops.h"
#include "nlohmann/json.hpp"
#include "tests/invariance/forward_harness.h"

namespace isobit::invariance {

// The models that golden.json knows: one of each architecture, the witnesses, and SmolLM2.
std::vector<std::string> GoldenNames();
// Where the model lies. Only SmolLM2 may be absent.
std::string GoldenModelDirectory(const std::string& name);
// The tokens that its digests are of: enough, in the tiny models, for the second split of attention
// (512 positions), and in witness-long for the third.
Tokens GoldenTokens(const std::string& name, const ForwardHarness& model);
nlohmann::json GoldenDigests(const std::string& name);

// The digests of `logits` [tokens, vocab]: of themselves, and, teacher-forced over the tokens
// behind a prompt, of raw logprobs of the tokens, of entropies, and of ids and processed logprobs
// of what would be drawn.
nlohmann::json DigestsOf(const ForwardHarness& model, const Tokens& tokens,
                         const SequenceLogits& logits, Ops& ops);

// The digest of what LogProbs makes of rows of 393,216 logits. In the range of the vocabulary that
// counts, a tenth of the mass lies in weights so small that the fraction bits they are cut to show
// in the sum. golden.json: "many-weights".
nlohmann::json ManyWeightsDigest(Ops& ops);

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_GOLDEN_H_
