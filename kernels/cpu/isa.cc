// Names of the instruction sets, and their detection.
#include "kernels/cpu/isa.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace isobit::cpu {

Isa DetectIsa() {
#if defined(__x86_64__)
  // These answers include whether the operating system saves the wide registers.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kPortable;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return Isa::kAvx2;
#else
  return Isa::kPortable;
#endif
}

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::optional<Isa> ParseIsa(std::string_view name) {
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (name == IsaName(isa)) return isa;
  }
  return std::nullopt;
}

absl::StatusOr<Isa> ChooseIsa(std::string_view name) {
  if (name == "auto") return DetectIsa();
  const std::optional<Isa> isa = ParseIsa(name);
  if (!isa) {
    return absl::InvalidArgumentError(absl::StrCat("--isa is \"", std::string(name),
                                                   "\", expected auto, avx512, avx2 or portable"));
  }
  if (*isa > DetectIsa()) {
    return absl::InvalidArgumentError(absl::StrCat("--isa is ", std::string(name),
                                                   ", this machine runs at most ",
                                                   std::string(IsaName(DetectIsa()))));
  }
  return *isa;
}

}  // namespace isobit::cpu
