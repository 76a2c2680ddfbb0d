// Flag parsing over Abseil's flag registry. Abseil's own parser is not used: it exits with status
// 1, reads flag files and the environment, and its --help knows only flags of the file that defines
// main.
#include "common/config/flags.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "common/base/exit_code.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/config/flag_hints.h"

namespace isobit {
namespace {

absl::Status SetFlag(absl::CommandLineFlag& flag, absl::string_view value) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(error);
}

std::vector<std::string> FlagNames() {
  std::vector<std::string> names;
  for (const auto& [name, flag] : absl::GetAllFlags()) names.emplace_back(name);
  return names;
}

// Sets the flag at argv[i] and moves i to its last argument.
absl::Status ParseOne(int argc, const char* const* argv, int& i) {
  absl::string_view text = argv[i];
  if (!absl::ConsumePrefix(&text, "--") || text.empty()) {
    const bool is_dashed = absl::ConsumePrefix(&text, "-");
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument \"", argv[i], "\", expected --flag=value",
                     is_dashed ? FlagHint(text.substr(0, text.find('=')), FlagNames()) : ""));
  }
  const size_t equals = text.find('=');
  const absl::string_view name = text.substr(0, equals);
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  if (flag != nullptr && equals != absl::string_view::npos) {
    return SetFlag(*flag, text.substr(equals + 1));
  }
  if (flag != nullptr && flag->IsOfType<bool>()) return SetFlag(*flag, "true");
  if (flag != nullptr) {
    if (i + 1 == argc) {
      return absl::InvalidArgumentError(absl::StrCat("flag --", name, " lacks a value"));
    }
    return SetFlag(*flag, argv[++i]);
  }
  absl::string_view positive = name;
  if (equals == absl::string_view::npos && absl::ConsumePrefix(&positive, "no")) {
    absl::CommandLineFlag* negated = absl::FindCommandLineFlag(positive);
    if (negated != nullptr && negated->IsOfType<bool>()) return SetFlag(*negated, "false");
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown flag --", name, FlagHint(name, FlagNames())));
}

}  // namespace

absl::StatusOr<bool> ParseFlags(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view word = argv[i];
    if (word == "--help" || word == "-h") return true;
  }
  for (int i = 1; i < argc; ++i) {
    ISOBIT_RETURN_IF_ERROR(ParseOne(argc, argv, i));
  }
  return false;
}

std::string FlagsHelp() {
  std::map<absl::string_view, absl::CommandLineFlag*> sorted;
  for (const auto& [name, flag] : absl::GetAllFlags()) sorted.emplace(name, flag);
  std::string help;
  for (const auto& [name, flag] : sorted) {
    absl::StrAppend(&help, "  --", name, " (default ", flag->DefaultValue(), ")\n      ",
                    flag->Help(), "\n");
  }
  return help;
}

std::string VersionOf(absl::string_view program) {
  program.remove_prefix(program.rfind('/') + 1);  // npos + 1 is 0
  return absl::StrCat(program, " ", ISOBIT_VERSION);
}

void ExitForBadUsage(const char* program, absl::string_view message) {
  internal::LastWords(absl::StrCat(program, ": ", message, "\nTry --help.\n"));
  std::exit(kExitBadUsage);
}

void ParseFlagsOrExit(int argc, const char* const* argv, const std::string& usage) {
  for (int i = 1; i < argc; ++i) {
    if (absl::string_view(argv[i]) != "--version") continue;
    std::printf("%s\n", VersionOf(argv[0]).c_str());
    std::exit(kExitStopped);
  }
  const absl::StatusOr<bool> help = ParseFlags(argc, argv);
  if (!help.ok()) {
    ExitForBadUsage(argc > 0 ? argv[0] : "isobit", help.status().message());
  }
  if (*help) {
    std::printf("%s\n\nFlags:\n%s", usage.c_str(), FlagsHelp().c_str());
    std::exit(kExitStopped);
  }
}

}  // namespace isobit
