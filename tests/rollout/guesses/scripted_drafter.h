// A drafter for tests, which knows what each sample will draw and guesses right, wrong or both.
#ifndef ISOBIT_TESTS_ROLLOUT_GUESSES_SCRIPTED_DRAFTER_H_
#define ISOBIT_TESTS_ROLLOUT_GUESSES_SCRIPTED_DRAFTER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rollout/guesses/drafter.h"
#include "rollout/guesses/speculation.h"

namespace isobit {

// By request id and sample: the completion.
using Script = std::map<std::pair<std::string, uint32_t>, std::vector<int32_t>>;

// Whether the guess for completion token `index` of a sample is to be right.
using IsRight = std::function<bool(uint32_t sample, size_t index)>;

IsRight Always();
IsRight Never();
IsRight UpTo(size_t index);  // right before it, wrong from it on
// Right with that probability; decided by a hash, so that a token's guess is always the same.
IsRight Mixed(double probability);

// Speculation as often as there is room, with that drafter alone. Wrong guesses are ids below
// vocab_size; behind the script's end anything is guessed.
SpeculationOptions Scripted(const std::shared_ptr<const Script>& script, const IsRight& is_right,
                            int32_t vocab_size, size_t max_guesses = 5);

// Times with which as many guesses as possible seem to pay.
StepCosts FreeGuesses();

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_GUESSES_SCRIPTED_DRAFTER_H_
