// The tiny random models that the invariance, accuracy and golden tests share. Each process makes
// them once; they are the same on every machine.
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

// Models that show small errors. In the models above rounding to bf16 hides most errors of one fp32
// ulp: an element shows one with a probability of about 2^-16. The witnesses have more elements for
// each multiplication, and enough layers to spread an error that shows once: "witness-deep" for
// everything except attention, "witness-long" for attention, over three splits. mutations.py proves
// it.
std::vector<std::string> WitnessModelNames();

// A directory of that name under TinyModelRoot(), holding the tiny or witness model.
std::string TinyModelDirectory(const std::string& name);
std::string TinyModelRoot();

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_TINY_MODELS_H_
