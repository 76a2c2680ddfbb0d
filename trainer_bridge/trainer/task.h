// What to learn: prompts by number, and a reward for each completion. A new task is a class here
// and a line in MakeTask.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_TASK_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_TASK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace isobit::trainer {

// INVARIANT: prompts and rewards depend on their arguments alone; otherwise a resumed run differs
// from an uninterrupted one (tests/torch/trainer_test.py).
class Task {
 public:
  virtual ~Task() = default;

  // The tokens, at least one, of prompt `number`, which counts from 0.
  virtual std::vector<int32_t> Prompt(int64_t number) const = 0;

  // How good a completion of that prompt is; finite. The completion includes its end-of-sequence
  // token, if it has one.
  virtual double Reward(int64_t number, absl::Span<const int32_t> completion) const = 0;
};

// The task of that name, for a model with so many tokens. INVALID_ARGUMENT: it does not exist.
absl::StatusOr<std::unique_ptr<Task>> MakeTask(const std::string& name, int64_t vocab_size);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_TASK_H_
