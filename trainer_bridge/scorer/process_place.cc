// The sources in the order of their precedence.
#include "trainer_bridge/scorer/process_place.h"

#include <initializer_list>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr int kMaxProcesses = 64;

// Reads the flag or, if it is not given, the first variable that is set; unset if none is.
class Source {
 public:
  explicit Source(const std::function<const char*(const char*)>& environment)
      : environment_(environment) {}

  absl::StatusOr<std::optional<int>> Number(const char* flag, const std::optional<int>& value,
                                            std::initializer_list<const char*> variables, int low,
                                            int high) const {
    std::string name = absl::StrCat("--", flag);
    std::optional<int> number = value;
    for (const char* variable : variables) {
      const char* const text = environment_(variable);
      if (number || text == nullptr || *text == '\0') continue;
      name = variable;
      int parsed = 0;
      if (!absl::SimpleAtoi(text, &parsed)) {
        return absl::InvalidArgumentError(
            absl::StrCat(variable, " is \"", text, "\", expected a number"));
      }
      number = parsed;
    }
    if (number && (*number < low || *number > high)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is ", *number, ", expected ", low, " to ", high));
    }
    return number;
  }

  std::string Text(const std::string& value, std::initializer_list<const char*> variables) const {
    if (!value.empty()) return value;
    for (const char* variable : variables) {
      const char* const text = environment_(variable);
      if (text != nullptr && *text != '\0') return text;
    }
    return "";
  }

 private:
  const std::function<const char*(const char*)>& environment_;
};

}  // namespace

absl::StatusOr<ProcessPlace> PlaceOfProcess(
    const PlaceFlags& flags, const std::function<const char*(const char*)>& environment) {
  const Source source(environment);
  ProcessPlace place;
  ISOBIT_ASSIGN_OR_RETURN(const std::optional<int> world_size,
                          source.Number("world_size", flags.world_size,
                                        {"WORLD_SIZE", "LWS_GROUP_SIZE"}, 1, kMaxProcesses));
  place.world_size = world_size.value_or(1);
  if (place.world_size == 1) {
    ISOBIT_RETURN_IF_ERROR(source.Number("rank", flags.rank, {}, 0, 0).status());
    return place;
  }

  ISOBIT_ASSIGN_OR_RETURN(
      const std::optional<int> rank,
      source.Number("rank", flags.rank, {"RANK", "LWS_WORKER_INDEX"}, 0, place.world_size - 1));
  if (!rank) {
    return absl::InvalidArgumentError(
        absl::StrCat("one of ", place.world_size,
                     " processes needs its rank: --rank, or RANK or LWS_WORKER_INDEX"));
  }
  place.rank = *rank;
  ISOBIT_ASSIGN_OR_RETURN(
      const std::optional<int> local_rank,
      source.Number("local_rank", std::nullopt, {"LOCAL_RANK"}, 0, place.world_size - 1));
  place.local_rank = local_rank.value_or(0);
  ISOBIT_ASSIGN_OR_RETURN(
      const std::optional<int> port,
      source.Number("master_port", flags.master_port, {"MASTER_PORT"}, 1, 65535));
  place.master_port = port.value_or(place.master_port);
  // torchrun's agent itself may listen on the port that it gives to its workers.
  const char* const agent_store = environment("TORCHELASTIC_USE_AGENT_STORE");
  const bool is_taken = agent_store != nullptr && absl::string_view(agent_store) == "True";
  if (!flags.master_port && is_taken && place.master_port < 65535) ++place.master_port;
  place.master_addr = source.Text(flags.master_addr, {"MASTER_ADDR", "LWS_LEADER_ADDRESS"});
  if (place.master_addr.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("one of ", place.world_size,
                     " processes needs the address of rank 0: --master_addr, or MASTER_ADDR or "
                     "LWS_LEADER_ADDRESS"));
  }
  return place;
}

}  // namespace isobit
