// isobit-model: makes, inspects, verifies and damages model directories.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/opened_model.h"
#include "common/checkpoint/readable_file.h"
#include "common/checkpoint/validate_tensors.h"
#include "common/config/flag_hints.h"
#include "common/config/flags.h"
#include "kernels/model/model_plan.h"
#include "tools/flip_bit.h"
#include "tools/model_report.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"
#include "tools/stored_digest.h"

namespace isobit {
namespace {

constexpr char kUsage[] =
    "isobit-model: makes, inspects, verifies and damages model directories.\n\n"
    "  isobit-model make SHAPE DIR [--seed=N]          random weights of a named shape\n"
    "  isobit-model make --config=FILE DIR [--seed=N]  random weights for a config.json\n"
    "  isobit-model config SHAPE DIR [--seed=N]        no weights: --load_format=dummy makes them\n"
    "  isobit-model check FILE     what a service makes of a config.json alone; also of a "
    "directory's\n"
    "  isobit-model inspect DIR    shape, fingerprints, tensors with digests, leaf plan per TP "
    "size\n"
    "  isobit-model verify DIR     checks config and checkpoint as a service would; prints the "
    "digest\n"
    "                              check, inspect and verify take a service's flag\n"
    "                              --ignore_config_fields=A,B, and the last two of them\n"
    "                              --round_fp16_weights and --allow_nonfinite_weights\n"
    "  isobit-model flip-bit DIR TENSOR INDEX BIT OUT_DIR\n"
    "                              a copy with one bit of one weight flipped; bit 0 is the "
    "lowest\n\n"
    "The directories are in the form of Hugging Face. Exit status: 0, 1 when the work fails, 2 for "
    "a\n"
    "command line that makes no sense.\n\nShapes: ";

// What follows the subcommand: options, and all other words in order.
struct Arguments {
  std::vector<std::string> positional;
  std::optional<std::string> seed;
  std::optional<std::string> config;
  std::optional<std::string> ignored_fields;  // separated by commas
  bool round_fp16 = false;
  bool allow_nonfinite = false;
};

absl::StatusOr<Arguments> ParseArguments(const std::vector<std::string>& words) {
  Arguments arguments;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!absl::StartsWith(word, "-")) {
      arguments.positional.push_back(word);
      continue;
    }
    if (word == "--round_fp16_weights" || word == "--allow_nonfinite_weights") {
      (word == "--round_fp16_weights" ? arguments.round_fp16 : arguments.allow_nonfinite) = true;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    std::optional<std::string>* option = name == "--seed"     ? &arguments.seed
                                         : name == "--config" ? &arguments.config
                                         : name == "--ignore_config_fields"
                                             ? &arguments.ignored_fields
                                             : nullptr;
    if (option == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "unknown option ", name,
          FlagHint(absl::StripPrefix(absl::StripPrefix(name, "-"), "-"),
                   {"seed", "config", "ignore_config_fields", "round_fp16_weights", "help"})));
    }
    if (equals != std::string::npos) {
      *option = word.substr(equals + 1);
    } else if (i + 1 < words.size()) {
      *option = words[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat("option ", name, " lacks a value"));
    }
  }
  return arguments;
}

template <class T>
absl::Status ParseNumber(const char* what, const std::string& text, T& value) {
  if (absl::SimpleAtoi(text, &value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected a number, got \"", text, "\""));
}

absl::StatusOr<ModelConfig> ConfigFromFile(const std::string& path, const LoadPolicy& policy = {}) {
  constexpr size_t kMaxBytes = 4 << 20;
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(path, kMaxBytes));
  return ParseModelConfig(text, "", policy);
}

// Prints a long job's progress to stderr once a second.
class Progress {
 public:
  void operator()(uint64_t done, uint64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(1)) return;
    last_ = now;
    absl::FPrintF(stderr, "made %.2f of %.2f GB\n", static_cast<double>(done) * 1e-9,
                  static_cast<double>(total) * 1e-9);
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// The commands return what they print.

absl::StatusOr<std::string> MakeWith(const Arguments& arguments,
                                     absl::Status (*make)(const ModelConfig&, uint64_t seed,
                                                          const std::string& directory)) {
  uint64_t seed = 0;
  if (arguments.seed) ISOBIT_RETURN_IF_ERROR(ParseNumber("--seed", *arguments.seed, seed));
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, arguments.config
                                                        ? ConfigFromFile(*arguments.config)
                                                        : NamedModelShape(arguments.positional[0]));
  const std::string& directory = arguments.positional.back();
  ISOBIT_RETURN_IF_ERROR(make(config, seed, directory));
  return absl::StrCat("made ", directory, " from seed ", seed, "\n");
}

absl::StatusOr<std::string> Make(const Arguments& arguments) {
  return MakeWith(arguments, [](const ModelConfig& config, uint64_t seed, const std::string& dir) {
    RandomModelOptions options;
    options.on_progress = Progress();
    return MakeRandomModel(config, seed, dir, options);
  });
}

absl::StatusOr<std::string> MakeConfig(const Arguments& arguments) {
  return MakeWith(arguments, MakeDummyModel);
}

LoadPolicy PolicyOf(const Arguments& arguments) {
  LoadPolicy policy = {.ignored_fields = {},
                       .round_fp16 = arguments.round_fp16,
                       .allow_nonfinite = arguments.allow_nonfinite};
  if (arguments.ignored_fields) {
    policy.ignored_fields = absl::StrSplit(*arguments.ignored_fields, ',');
  }
  return policy;
}

// Weights need not be there. `isobit doctor` asks this before anything is downloaded.
absl::StatusOr<std::string> Check(const Arguments& arguments) {
  const std::string& path = arguments.positional[0];
  const LoadPolicy policy = PolicyOf(arguments);
  std::error_code error;
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, std::filesystem::is_directory(path, error)
                                                        ? LoadModelConfig(path, "", policy)
                                                        : ConfigFromFile(path, policy));
  return absl::StrCat(ArchitectureName(config.architecture), ", ", NumParameters(ModelPlan(config)),
                      " parameters, context ", config.max_position_embeddings, "\n\n",
                      config.CanonicalString());
}

absl::StatusOr<std::string> InspectOrVerify(const Arguments& arguments, bool inspect) {
  const std::string& directory = arguments.positional[0];
  const LoadPolicy policy = PolicyOf(arguments);
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(directory, "", policy));
  ISOBIT_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(directory));
  ISOBIT_RETURN_IF_ERROR(ValidateTensors(ModelPlan(config), checkpoint));
  ISOBIT_RETURN_IF_ERROR(CheckRounding(checkpoint, policy));
  for (const std::string& warning : Warnings(config, checkpoint)) {
    absl::FPrintF(stderr, "isobit-model: warning: %s\n", warning);
  }
  ISOBIT_ASSIGN_OR_RETURN(const CheckpointDigests digests,
                          DigestTensors(checkpoint, policy.allow_nonfinite));
  ISOBIT_RETURN_IF_ERROR(CheckTiedTensors(ModelPlan(config), digests));
  if (inspect) {
    ISOBIT_ASSIGN_OR_RETURN(const std::string stored_digest, StoredDigest(checkpoint));
    return ReportModel(config, checkpoint, digests, stored_digest);
  }
  return absl::StrCat(digests.checkpoint, "  ", directory, "\n");
}

absl::StatusOr<std::string> Inspect(const Arguments& arguments) {
  return InspectOrVerify(arguments, true);
}

absl::StatusOr<std::string> Verify(const Arguments& arguments) {
  return InspectOrVerify(arguments, false);
}

absl::StatusOr<std::string> Flip(const Arguments& arguments) {
  const std::vector<std::string>& words = arguments.positional;
  FlippedBit what = {.tensor = words[1]};
  ISOBIT_RETURN_IF_ERROR(ParseNumber("INDEX", words[2], what.index));
  ISOBIT_RETURN_IF_ERROR(ParseNumber("BIT", words[3], what.bit));
  ISOBIT_ASSIGN_OR_RETURN(const std::string said, FlipBit(words[0], what, words[4]));
  return said + "\n";
}

struct Command {
  const char* name;
  size_t num_positional;
  absl::StatusOr<std::string> (*run)(const Arguments& arguments);
};
constexpr Command kCommands[] = {{"make", 2, Make},     {"config", 2, MakeConfig},
                                 {"check", 1, Check},   {"inspect", 1, Inspect},
                                 {"verify", 1, Verify}, {"flip-bit", 5, Flip}};

int UsageError(absl::string_view what) {
  absl::FPrintF(stderr, "isobit-model: %s\nTry --help.\n", what);
  return 2;
}

int Run(const std::vector<std::string>& words) {
  const auto has = [&](const char* word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  if (has("--version")) {
    absl::PrintF("%s\n", VersionOf("isobit-model"));
    return 0;
  }
  if (has("--help") || has("-h")) {
    absl::PrintF("%s%s.\n", kUsage, absl::StrJoin(ModelShapeNames(), ", "));
    return 0;
  }
  if (words.empty()) return UsageError("a command is missing");
  const auto command = std::find_if(std::begin(kCommands), std::end(kCommands),
                                    [&](const Command& c) { return words[0] == c.name; });
  if (command == std::end(kCommands)) return UsageError(absl::StrCat("unknown command ", words[0]));
  const absl::StatusOr<Arguments> arguments = ParseArguments({words.begin() + 1, words.end()});
  if (!arguments.ok()) return UsageError(arguments.status().message());
  const bool makes = command->run == Make || command->run == MakeConfig;
  if (!makes && (arguments->seed || arguments->config)) {
    return UsageError("--seed and --config are for make and config");
  }
  const bool opens = command->run == Inspect || command->run == Verify;
  if (!opens && (arguments->round_fp16 || arguments->allow_nonfinite)) {
    return UsageError(
        "--round_fp16_weights and --allow_nonfinite_weights are for inspect and verify");
  }
  if (!opens && command->run != Check && arguments->ignored_fields) {
    return UsageError("--ignore_config_fields is for check, inspect and verify");
  }
  const size_t expected = command->num_positional - (arguments->config ? 1 : 0);
  if (arguments->positional.size() != expected) {
    return UsageError(absl::StrCat(words[0], ": expected ", expected, " arguments, got ",
                                   arguments->positional.size()));
  }
  const absl::StatusOr<std::string> output = command->run(*arguments);
  if (!output.ok()) {
    absl::FPrintF(stderr, "isobit-model: %s\n", output.status().ToString());
    return 1;
  }
  absl::PrintF("%s", *output);
  return 0;
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) { return isobit::Run({argv + 1, argv + argc}); }
