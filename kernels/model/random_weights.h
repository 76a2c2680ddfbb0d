// Random weights for tests, benchmarks and load_format dummy. Each element depends only on seed,
// tensor name and index, so the bytes are the same on every machine and for every split.
#ifndef ISOBIT_KERNELS_MODEL_RANDOM_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_RANDOM_WEIGHTS_H_

#include <cstddef>
#include <cstdint>

#include "common/checkpoint/tensor_plan.h"

namespace isobit {

// One tensor's weights, nearly normally distributed. The scales keep activations near 1 and give
// the logits a deviation of about 2.5, so that distributions are neither flat nor certain.
class RandomTensor {
 public:
  RandomTensor(const ExpectedTensor& spec, uint64_t seed);

  // Writes elements [first, first + count), in row-major order, as bf16.
  void Draw(size_t first, size_t count, uint16_t* out) const;

 private:
  uint64_t key_;
  float mean_ = 0.0f;
  float deviation_ = 0.0f;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_RANDOM_WEIGHTS_H_
