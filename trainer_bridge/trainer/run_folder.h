// The folder of a run: `metrics.jsonl` (one line per step), `recipe.json`, `checkpoints/step-N/`
// and `model/`. Open accepts the folder at whatever moment the process is killed.
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

// The state of a run after a step.
struct Saved {
  int64_t step = 0;
  std::string weights_digest;
  std::vector<Tensor> state;   // their data are in `bytes`
  std::vector<uint8_t> bytes;  // of the file
};

class RunFolder {
 public:
  // Creates the folder, or resumes the run in it. INVALID_ARGUMENT: it has a run and `resume` is
  // false, or its run has another recipe.
  static absl::StatusOr<RunFolder> Open(const std::string& path, const nlohmann::json& recipe,
                                        bool resume);

  // The latest checkpoint, if there is one. Removes the metrics of later steps. INVALID_ARGUMENT,
  // naming the file: it does not have the content that was written.
  absl::StatusOr<std::optional<Saved>> Load();

  // Appends the metrics of a step.
  absl::Status Add(int64_t step, const nlohmann::ordered_json& values);

  // Saves the run after `step`, completely or not at all. Does nothing if that step is already
  // saved. Keeps two checkpoints.
  absl::Status Save(int64_t step, const std::string& weights_digest,
                    const std::vector<Tensor>& state);

  // Where the run's model is saved.
  std::string ModelPath() const { return path_ + "/model"; }

 private:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}

  // The steps with a complete checkpoint, ascending.
  absl::StatusOr<std::vector<int64_t>> Checkpoints() const;
  std::string CheckpointPath(int64_t step) const;
  absl::Status DropMetricsAfter(int64_t step) const;

  std::string path_;
};

// Copies a model directory's other files: config, tokenizer, templates.
absl::Status CopyModelTexts(const std::string& from, const std::string& to);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_FOLDER_H_
