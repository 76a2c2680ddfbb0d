// Reads, writes and removes the files of a run.
#include "trainer_bridge/trainer/run_folder.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/atomic_file.h"
#include "common/checkpoint/readable_file.h"
#include "common/checkpoint/strict_json.h"

namespace isobit::trainer {
namespace {

namespace fs = std::filesystem;

constexpr size_t kKeptCheckpoints = 2;
constexpr size_t kMaxTextBytes = size_t{1} << 30;
constexpr char kStateFile[] = "/state.safetensors";
constexpr char kRunFile[] = "/run.json";
constexpr char kStepPrefix[] = "step-";

absl::Status ErrorOf(const std::string& path, const std::error_code& error) {
  return absl::UnknownError(absl::StrCat(path, ": ", error.message()));
}

absl::Status MakeDirectory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  return error ? ErrorOf(path, error) : absl::OkStatus();
}

absl::Status Remove(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return error ? ErrorOf(path, error) : absl::OkStatus();
}

absl::StatusOr<nlohmann::json> ReadJson(const std::string& path) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxTextBytes));
  return ParseJsonObject(text, path);
}

// "seed was 1 and is 2, ..."; empty if both are equal.
std::string Changes(const nlohmann::json& was, const nlohmann::json& is) {
  std::set<std::string> names;
  for (const nlohmann::json* recipe : {&was, &is}) {
    for (const auto& item : recipe->items()) names.insert(item.key());
  }
  const auto told = [](const nlohmann::json& recipe, const std::string& name) {
    return recipe.contains(name) ? recipe[name].dump() : std::string("not set");
  };
  std::string changes;
  for (const std::string& name : names) {
    const std::string before = told(was, name);
    const std::string after = told(is, name);
    if (before == after) continue;
    absl::StrAppend(&changes, changes.empty() ? "" : ", ", name, " was ", before, " and is ",
                    after);
  }
  return changes;
}

// The step of a whole checkpoint's folder.
std::optional<int64_t> StepOf(const std::string& name) {
  int64_t step = 0;
  if (!absl::StartsWith(name, kStepPrefix)) return std::nullopt;
  if (!absl::SimpleAtoi(name.substr(sizeof(kStepPrefix) - 1), &step)) return std::nullopt;
  return step;
}

// Reads the state that Save has written, into memory of its own.
absl::Status ReadState(const std::string& path, Saved* saved) {
  ISOBIT_ASSIGN_OR_RETURN(const ReadableFile file, ReadableFile::Open(path, path));
  ISOBIT_ASSIGN_OR_RETURN(const std::string head, ReadSafetensorsHead(file, path));
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<StoredTensor> tensors,
                          ParseSafetensors(head, file.size(), path));
  saved->bytes.resize(file.size());
  ISOBIT_RETURN_IF_ERROR(file.ReadAt(0, saved->bytes.size(), saved->bytes.data()));
  for (const StoredTensor& stored : tensors) {
    saved->state.push_back(stored.tensor);
    saved->state.back().data = saved->bytes.data() + stored.offset;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RunFolder> RunFolder::Open(const std::string& path, const nlohmann::json& recipe,
                                          bool resume) {
  const std::string file = path + "/recipe.json";
  if (fs::exists(file)) {
    if (!resume) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " holds a run: --resume goes on with it, or give another --output"));
    }
    ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json was, ReadJson(file));
    if (const std::string changes = Changes(was, recipe); !changes.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(path, " holds another run: ", changes));
    }
    return RunFolder(path);
  }
  ISOBIT_RETURN_IF_ERROR(MakeDirectory(path));
  ISOBIT_RETURN_IF_ERROR(WriteFileAtomically(file, {recipe.dump(1)}));
  return RunFolder(path);
}

std::string RunFolder::CheckpointPath(int64_t step) const {
  return absl::StrFormat("%s/checkpoints/%s%08d", path_, kStepPrefix, step);
}

absl::StatusOr<std::vector<int64_t>> RunFolder::Checkpoints() const {
  std::vector<int64_t> steps;
  const std::string folder = path_ + "/checkpoints";
  if (!fs::exists(folder)) return steps;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (const auto step = StepOf(entry->path().filename().string())) steps.push_back(*step);
  }
  if (error) return ErrorOf(folder, error);
  std::sort(steps.begin(), steps.end());
  return steps;
}

absl::StatusOr<std::optional<Saved>> RunFolder::Load() {
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, Checkpoints());
  std::optional<Saved> saved;
  if (!steps.empty()) {
    saved.emplace();
    saved->step = steps.back();
    const std::string path = CheckpointPath(saved->step);
    ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json run, ReadJson(path + kRunFile));
    if (!run.contains("weights_digest") || !run["weights_digest"].is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, kRunFile, ": expected a weights_digest"));
    }
    saved->weights_digest = run["weights_digest"].get<std::string>();
    ISOBIT_RETURN_IF_ERROR(ReadState(path + kStateFile, &*saved));
  }
  ISOBIT_RETURN_IF_ERROR(DropMetricsAfter(saved ? saved->step : 0));
  return saved;
}

absl::Status RunFolder::DropMetricsAfter(int64_t step) const {
  const std::string path = path_ + "/metrics.jsonl";
  if (!fs::exists(path)) return absl::OkStatus();
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxTextBytes));
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  lines.pop_back();  // what follows the last line's end: nothing, or a line that was cut short
  std::string kept;
  for (const std::string& line : lines) {
    ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json values, ParseJsonObject(line, path));
    if (!values.contains("step") || !values["step"].is_number_integer()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": a line has no step: ", line));
    }
    if (values["step"].get<int64_t>() <= step) absl::StrAppend(&kept, line, "\n");
  }
  return WriteFileAtomically(path, {kept});
}

absl::Status RunFolder::Add(int64_t step, const nlohmann::ordered_json& values) {
  nlohmann::ordered_json line = {{"step", step}};
  line.update(values);
  // JSON lacks these numbers, and null would say nothing of them.
  for (nlohmann::ordered_json& value : line) {
    if (!value.is_number_float() || std::isfinite(value.get<double>())) continue;
    value = std::isnan(value.get<double>()) ? "NaN"
            : value.get<double>() > 0       ? "Infinity"
                                            : "-Infinity";
  }
  const std::string path = path_ + "/metrics.jsonl";
  std::ofstream file(path, std::ios::app);
  file << line.dump() << std::endl;
  if (file.good()) return absl::OkStatus();
  return absl::UnknownError(absl::StrCat(path, ": could not be written"));
}

absl::Status RunFolder::Save(int64_t step, const std::string& weights_digest,
                             const std::vector<Tensor>& state) {
  const std::string target = CheckpointPath(step);
  // Before the first step the optimizer has no state, and there is nothing to lose.
  if (step == 0 || fs::exists(target)) return absl::OkStatus();
  const std::string partial = target + ".partial";
  ISOBIT_RETURN_IF_ERROR(Remove(partial));
  ISOBIT_RETURN_IF_ERROR(MakeDirectory(partial));
  ISOBIT_RETURN_IF_ERROR(WriteSafetensors(partial + kStateFile, state));
  const nlohmann::json run = {{"step", step}, {"weights_digest", weights_digest}};
  ISOBIT_RETURN_IF_ERROR(WriteFileAtomically(partial + kRunFile, {run.dump()}));
  std::error_code error;
  fs::rename(partial, target, error);
  if (error) return ErrorOf(target, error);
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, Checkpoints());
  for (size_t i = 0; i + kKeptCheckpoints < steps.size(); ++i) {
    ISOBIT_RETURN_IF_ERROR(Remove(CheckpointPath(steps[i])));
  }
  return absl::OkStatus();
}

absl::Status CopyModelTexts(const std::string& from, const std::string& to) {
  std::error_code error;
  for (fs::directory_iterator entry(from, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const std::string suffix = entry->path().extension().string();
    const bool is_text = suffix == ".json" || suffix == ".jinja" || suffix == ".txt";
    if (!is_text || absl::EndsWith(name, ".index.json")) continue;
    fs::copy_file(entry->path(), fs::path(to) / name, fs::copy_options::overwrite_existing, error);
    if (error) break;
  }
  return error ? ErrorOf(from, error) : absl::OkStatus();
}

}  // namespace isobit::trainer
