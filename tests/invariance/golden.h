// Golden bits: digests of logits, logprobs and draws for fixed models and tokens, computed on a
// CPU. Every kernel, on any device, is held to them; a change of golden.json is a new contract
// version.
#ifndef ISOBIT_TESTS_INVARIANCE_GOLDEN_H_
#define ISOBIT_TESTS_INVARIANCE_GOLDEN_H_

#include <string>
#include <vector>

#include "kernels/backend.h"
#include "nlohmann/json.hpp"
#include "tests/invariance/forward_harness.h"

namespace isobit::invariance {

// The models that golden.json knows: one of each architecture, the witnesses, and SmolLM2.
std::vector<std::string> GoldenNames();
// Where the model lies. Only SmolLM2 may be absent.
std::string GoldenModelDirectory(const std::string& name);
// The tokens of its digests: enough to reach the second split of attention (512 positions) in the
// tiny models, and the third in witness-long.
Tokens GoldenTokens(const std::string& name, const ForwardHarness& model);
nlohmann::json GoldenDigests(const std::string& name);

// The digests of `logits` [tokens, vocab] themselves, and of what follows from them, teacher-forced
// over the tokens behind a prompt: raw logprobs of the tokens, entropies, and ids and processed
// logprobs of the tokens that would be drawn.
nlohmann::json DigestsOf(const ForwardHarness& model, const Tokens& tokens,
                         const SequenceLogits& logits, Backend& ops);

// The digest of LogProbs' results for rows of 393,216 logits. In the range that has most of the
// mass, a tenth of the mass is in such small weights that their number of fraction bits changes the
// sum. golden.json: "many-weights".
nlohmann::json ManyWeightsDigest(Backend& ops);

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_GOLDEN_H_
