// The tiny random models that the invariance, accuracy and golden tests share: made once a process,
// the same everywhere.
#ifndef ISOBIT_TESTS_INVARIANCE_TINY_MODELS_H_
#define ISOBIT_TESTS_INVARIANCE_TINY_MODELS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace isobit::invariance {

// The seed of every tiny model; the committed references and golden digests belong to it.
inline constexpr uint64_t kTinyModelSeed = 20;

// One for each architecture, with awkward shapes (tools/model_shapes.h).
std::vector<std::string> TinyModelNames();

// Models in which little is hidden. In the ones above rounding to bf16 swallows most errors of an
// fp32 ulp: an element shows one with a chance of some 2^-16. These have more elements for each
// multiplication, and layers enough for what shows once to spread: "witness-deep" for all that is
// not attention, "witness-long" for attention, over three splits. mutations.py is the proof.
std::vector<std::string> WitnessModelNames();

// A directory of that name under TinyModelRoot(), holding the tiny or witness model.
std::string TinyModelDirectory(const std::string& name);
std::string TinyModelRoot();

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_TINY_MODELS_H_
