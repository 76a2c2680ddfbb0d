// What all backends check of a loss's arguments.
#include "kernels/ops/losses.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

absl::Status Refuse(const char* name, const char* expected, float got) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": expected ", expected, ", got ", got));
}

}  // namespace

absl::Status CheckBounds(const PolicyLossArgs& args) {
  // As "not at least 0", so that NaN is refused too.
  if (!(args.clip_low >= 0.0f)) return Refuse("clip_low", "at least 0", args.clip_low);
  if (!(args.clip_high >= 0.0f)) return Refuse("clip_high", "at least 0", args.clip_high);
  if (!(args.kl >= 0.0f) || std::isinf(args.kl)) {
    return Refuse("kl", "a finite number of at least 0", args.kl);
  }
  return absl::OkStatus();
}

}  // namespace isobit
