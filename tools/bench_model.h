// The model of a benchmark that needs a real one's shape and no meaning.
#ifndef ISOBIT_TOOLS_BENCH_MODEL_H_
#define ISOBIT_TOOLS_BENCH_MODEL_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"

namespace isobit::bench {

inline constexpr char kBenchModel[] = "model";  // its directory, relative to the root

// Calls `body` with a shape, by isobit-model's name, of `layers` layers (0: all), and the root of a
// directory of it for load_format dummy, which is removed afterwards. Errors of NamedModelShape,
// MakeDummyModel and `body`.
absl::Status WithDummyModel(
    const std::string& shape, int layers,
    const std::function<absl::Status(const ModelConfig& config, const std::string& root)>& body);

}  // namespace isobit::bench

#endif  // ISOBIT_TOOLS_BENCH_MODEL_H_
