// Makes a temporary model directory of the wanted shape for as long as a measurement runs.
#include "bench/kernels/model.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit::bench {

absl::Status WithDummyModel(
    const std::string& shape, int layers, int share,
    const std::function<absl::Status(const ModelConfig& config, const std::string& root)>& body) {
  ISOBIT_ASSIGN_OR_RETURN(ModelConfig config, NamedModelShape(shape));
  if (layers > 0) {
    config.num_layers = layers;
    config.layer_windows.clear();
  }
  if (share < 1 || config.num_kv_heads % share != 0 || config.intermediate_size % share != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "1/", share, " of ", shape, ": expected a divisor of its ", config.num_kv_heads,
        " key and value heads and of its intermediate size of ", config.intermediate_size));
  }
  config.num_heads /= share;
  config.num_kv_heads /= share;
  config.intermediate_size /= share;
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / absl::StrCat("isobit-bench-", getpid());
  absl::Status status = MakeDummyModel(config, 1, (root / kBenchModel).string());
  if (status.ok()) status = body(config, root.string());
  std::error_code ignored;
  std::filesystem::remove_all(root, ignored);
  return status;
}

}  // namespace isobit::bench
