// Makes the tiny models on first use, in a directory that lives as long as the process. See
// tiny_models.h.
#include "tests/invariance/tiny_models.h"

#include <filesystem>

#include "common/base/check.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit::invariance {
namespace {

const testing_support::TempDir& Root() {
  static const testing_support::TempDir root;
  return root;
}

}  // namespace

std::vector<std::string> TinyModelNames() {
  return {"tiny-qwen3", "tiny-qwen2", "tiny-llama", "tiny-mistral"};
}

std::string TinyModelRoot() { return Root().path(); }

std::string TinyModelDirectory(const std::string& name) {
  const std::string directory = Root().File(name);
  if (std::filesystem::exists(directory)) return directory;
  const auto config = NamedModelShape(name);
  ISOBIT_CHECK(config.ok()) << config.status().ToString();
  const absl::Status made = MakeRandomModel(*config, kTinyModelSeed, directory);
  ISOBIT_CHECK(made.ok()) << made.ToString();
  return directory;
}

}  // namespace isobit::invariance
