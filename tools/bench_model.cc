// See bench_model.h.
#include "tools/bench_model.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit::bench {

absl::Status WithDummyModel(
    const std::string& shape, int layers,
    const std::function<absl::Status(const ModelConfig& config, const std::string& root)>& body) {
  ISOBIT_ASSIGN_OR_RETURN(ModelConfig config, NamedModelShape(shape));
  if (layers > 0) {
    config.num_layers = layers;
    config.layer_windows.clear();
  }
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / absl::StrCat("isobit-bench-", getpid());
  absl::Status status = MakeDummyModel(config, 1, (root / kBenchModel).string());
  if (status.ok()) status = body(config, root.string());
  std::error_code ignored;
  std::filesystem::remove_all(root, ignored);
  return status;
}

}  // namespace isobit::bench
