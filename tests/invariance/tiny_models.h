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

// A directory of that name under TinyModelRoot(), holding the model of the named shape.
std::string TinyModelDirectory(const std::string& name);
std::string TinyModelRoot();

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_TINY_MODELS_H_
