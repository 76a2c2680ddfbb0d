// The folder of a run: `metrics.jsonl` (one line a step), `recipe.json`, `checkpoints/step-N/` and
// `model/`. Whatever moment the process is killed in, the folder is one that Open takes.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_FOLDER_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_FOLDER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/safetensors.h"
#include "nlohmann/json.hpp"

namespace isobit::trainer {

// A run as it was after a step.
struct Saved {
  int64_t step = 0;
  std::string weights_digest;
  std::vector<Tensor> state;   // their data lie in `bytes`
  std::vector<uint8_t> bytes;  // of the file
};

class RunFolder {
 public:
  // Makes the folder, or goes on with what is there. INVALID_ARGUMENT: it holds a run already and
  // `resume` is false, or one of another recipe.
  static absl::StatusOr<RunFolder> Open(const std::string& path, const nlohmann::json& recipe,
                                        bool resume);

  // The latest checkpoint, if there is one. Metrics of later steps go. INVALID_ARGUMENT names a
  // file that is not what was written.
  absl::StatusOr<std::optional<Saved>> Load();

  // Appends the metrics of a step.
  absl::Status Add(int64_t step, const nlohmann::ordered_json& values);

  // Saves the run after `step`, all or nothing; does nothing where that is saved already. Two
  // checkpoints are kept.
  absl::Status Save(int64_t step, const std::string& weights_digest,
                    const std::vector<Tensor>& state);

  // Where the run's model goes.
  std::string ModelPath() const { return path_ + "/model"; }

 private:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}

  // The steps that have a whole checkpoint, ascending.
  absl::StatusOr<std::vector<int64_t>> Checkpoints() const;
  std::string CheckpointPath(int64_t step) const;
  absl::Status DropMetricsAfter(int64_t step) const;

  std::string path_;
};

// Copies what a model directory has beside its weights: config, tokenizer, templates.
absl::Status CopyModelTexts(const std::string& from, const std::string& to);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_FOLDER_H_
