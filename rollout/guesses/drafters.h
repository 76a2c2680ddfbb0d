// All drafters: makes those that --speculation names.
#ifndef ISOBIT_ROLLOUT_GUESSES_DRAFTERS_H_
#define ISOBIT_ROLLOUT_GUESSES_DRAFTERS_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "rollout/guesses/drafter.h"

namespace isobit {

struct DrafterLimits {
  size_t history_bytes = size_t{64} << 20;
};

std::unique_ptr<Drafter> MakeLookupDrafter();
// max_bytes: bound of all texts together, as in HistoryStore.
std::unique_ptr<Drafter> MakeHistoryDrafter(size_t max_bytes);

// names: drafters separated by commas, or "off", for which the result is null. INVALID_ARGUMENT: a
// name is unknown or repeated.
absl::StatusOr<std::function<std::vector<std::unique_ptr<Drafter>>()>> DraftersOf(
    absl::string_view names, const DrafterLimits& limits);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_DRAFTERS_H_
