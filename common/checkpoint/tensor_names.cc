// The names of rotary buffers.
#include "common/checkpoint/tensor_names.h"

#include "absl/strings/match.h"

namespace isobit {

bool IsRotaryBuffer(absl::string_view name) {
  constexpr absl::string_view kBuffers[] = {"inv_freq", "original_inv_freq", "cos_cached",
                                            "sin_cached"};
  const size_t dot = name.rfind('.');
  if (dot == absl::string_view::npos) return false;
  const absl::string_view module = name.substr(0, dot);
  const size_t before = module.rfind('.');
  const absl::string_view module_name =
      before == absl::string_view::npos ? module : module.substr(before + 1);
  if (!absl::StartsWith(module_name, "rotary")) return false;
  for (const absl::string_view buffer : kBuffers) {
    if (name.substr(dot + 1) == buffer) return true;
  }
  return false;
}

}  // namespace isobit
