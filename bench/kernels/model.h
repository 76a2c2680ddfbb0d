// The model of a benchmark, which needs only a real model's shape.
#ifndef ISOBIT_BENCH_KERNELS_MODEL_H_
#define ISOBIT_BENCH_KERNELS_MODEL_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"

namespace isobit::bench {

inline constexpr char kBenchModel[] = "model";  // its directory, relative to the root

// Makes a model directory for load format `dummy`, with a shape of isobit-model's and `layers`
// layers (0: all), calls `body` with its config and root, and removes it. `share` divides the heads
// and the intermediate size: at TP n, a rank has the layers that the whole model's has at TP
// n * share. INVALID_ARGUMENT: `share` does not divide them. Other errors: those of
// NamedModelShape, MakeDummyModel and `body`.
absl::Status WithDummyModel(
    const std::string& shape, int layers, int share,
    const std::function<absl::Status(const ModelConfig& config, const std::string& root)>& body);

}  // namespace isobit::bench

#endif  // ISOBIT_BENCH_KERNELS_MODEL_H_
