// The instruction sets for which the CPU kernels are compiled, and which of them this machine has.
#ifndef ISOBIT_KERNELS_CPU_ISA_H_
#define ISOBIT_KERNELS_CPU_ISA_H_

#include <optional>
#include <string_view>

#include "absl/status/statusor.h"

namespace isobit::cpu {

// Ascending: a machine with one level also has all levels below it.
enum class Isa {
  kPortable,  // the compiler's baseline
  kAvx2,      // AVX2 and FMA
  kAvx512,    // AVX-512 F, BW, DQ and VL, and AVX2 and FMA
};

// The highest level that both this processor and its operating system support.
Isa DetectIsa();

// "portable", "avx2" or "avx512".
std::string_view IsaName(Isa isa);

// The inverse of IsaName(); nullopt for any other text.
std::optional<Isa> ParseIsa(std::string_view name);

// The value of a flag --isa; "auto" means DetectIsa(). INVALID_ARGUMENT: it is neither "auto" nor a
// name, or this machine does not have the level.
absl::StatusOr<Isa> ChooseIsa(std::string_view name);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_ISA_H_
