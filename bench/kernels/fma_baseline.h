// The CPU baseline of isobit-bench: a plain fp32 FMA product over the same packed bf16 weights. It
// keeps no contract, so the compiler may fuse multiplications and additions in its files.
#ifndef ISOBIT_BENCH_KERNELS_FMA_BASELINE_H_
#define ISOBIT_BENCH_KERNELS_FMA_BASELINE_H_

#include <cstdint>

#include "kernels/cpu/isa.h"

namespace isobit {

// y[m, 32] = x[m, k] . w, w being one panel [k][32] of bf16; x and y are fp32, ldx and ldy elements
// apart. k is a multiple of 4.
using FmaPanelFn = void (*)(const float* x, int64_t ldx, int64_t m, const uint16_t* w, int64_t k,
                            float* y, int64_t ldy);

// The variant for `isa`. The portable one has no FMA instruction: it multiplies, then adds.
FmaPanelFn GetFmaPanel(cpu::Isa isa);

}  // namespace isobit

#endif  // ISOBIT_BENCH_KERNELS_FMA_BASELINE_H_
