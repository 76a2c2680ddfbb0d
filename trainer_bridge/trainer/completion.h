// One sample of one prompt.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_COMPLETION_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_COMPLETION_H_

#include <cstdint>
#include <vector>

namespace isobit::trainer {

struct Completion {
  int64_t number = 0;  // of its prompt since the run's start; decides prompt and seed
  int32_t index = 0;   // among the prompt's samples
  std::vector<int32_t> prompt;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;  // the rollout's, one per token
  double reward = 0;
};

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_COMPLETION_H_
