// The instruction sets the CPU kernels are compiled for, and which of them this machine can run.
#ifndef ISOBIT_KERNELS_CPU_ISA_H_
#define ISOBIT_KERNELS_CPU_ISA_H_

#include <optional>
#include <string_view>

#include "absl/status/statusor.h"

namespace isobit::cpu {

// Ascending: a machine that runs one level runs every level below it.
enum class Isa {
  kPortable,  // the compiler's baseline
  kAvx2,      // AVX2 and FMA
  kAvx512,    // AVX-512 F, BW, DQ and VL, beside AVX2 and FMA
};

// The highest level that both this processor and its operating system support.
Isa DetectIsa();

// "portable", "avx2" or "avx512".
std::string_view IsaName(Isa isa);

// The inverse of IsaName(); nullopt for any other text.
std::optional<Isa> ParseIsa(std::string_view name);

// The value of a flag --isa; "auto" is DetectIsa(). INVALID_ARGUMENT: neither "auto" nor a name, or
// a level that this machine does not run.
absl::StatusOr<Isa> ChooseIsa(std::string_view name);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_ISA_H_
