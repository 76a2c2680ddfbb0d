// One training step of a small model, from ids to new weights, in which every training op occurs.
#ifndef ISOBIT_TESTS_KERNELS_TRAINING_STEP_H_
#define ISOBIT_TESTS_KERNELS_TRAINING_STEP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/ops/op_table.h"
#include "tests/kernels/training_cases.h"

namespace isobit::testing_support {

struct StepMemory {
  // Zeroed bytes that both the host and the backend reach, at a multiple of 256; they outlive the
  // step.
  std::function<std::byte*(size_t bytes)> allocate;
  // Returns once the backend has done all ops so far.
  std::function<void()> wait;
};

// Token rows of the step. It has two sequences, and rows of none behind them.
inline constexpr int64_t kStepRows = 160;

// Runs the step: a layer with q and k norms and a bias, filtered logprobs of some rows, the clipped
// loss, all gradients, and AdamW. `packs`: of kStepRows rows. Returns the bits of all results.
Bits RunTrainingStep(OpTable& ops, const std::vector<int64_t>& packs, const StepMemory& memory);

// Those results of the step that are sums of products over token rows: other packs give them other
// bits. (The table's gradient adds up bf16 values, which is often exact.)
inline constexpr const char* kSumsOverRows[] = {
    "qkv.dw.0",     "qkv.dw.1",     "qkv.dw.2",  "qkv.dbias",    "o.dw.0",
    "gate_up.dw.0", "gate_up.dw.1", "down.dw.0", "lm_head.dw.0", "norm1.dw",
    "norm2.dw",     "norm3.dw",     "q_norm.dw", "k_norm.dw"};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_TRAINING_STEP_H_
