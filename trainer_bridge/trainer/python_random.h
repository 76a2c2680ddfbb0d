// Draws the same integers as Python's random.Random(text), so that a task has the same prompts as
// in python/examples/on_policy/tasks.py.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_PYTHON_RANDOM_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_PYTHON_RANDOM_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace isobit::trainer {

// The Mersenne twister MT19937, seeded as Python seeds it from a string, which must not be empty.
class PythonRandom {
 public:
  explicit PythonRandom(absl::string_view text);

  // Python's randrange(bound), in [0, bound). bound: at least 1.
  uint32_t Below(uint32_t bound);

 private:
  static constexpr size_t kWords = 624;

  uint32_t Next();
  void Refill();

  std::array<uint32_t, kWords> state_;
  size_t used_ = kWords;
};

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_PYTHON_RANDOM_H_
