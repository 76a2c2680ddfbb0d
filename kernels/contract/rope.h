// C5: the rotary table, made once on the host in float64 by our own code, because a libm may differ
// between machines.
#ifndef ISOBIT_KERNELS_CONTRACT_ROPE_H_
#define ISOBIT_KERNELS_CONTRACT_ROPE_H_

#include <cstdint>
#include <vector>

namespace isobit::contract {

struct RopeScaling {
  enum class Type : int32_t { kNone = 0, kLinear = 1, kLlama3 = 2 };
  Type type = Type::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;  // kLlama3 only, as are the two below
  double high_freq_factor = 4.0;
  double original_max_positions = 8192.0;
};

// Angle per position of each pair, head_dim / 2 values: theta^(-2i/head_dim), scaled, rounded to
// fp32 as Hugging Face keeps them. The llama3 rule is that of transformers' modeling_rope_utils.
std::vector<float> InverseFrequencies(int32_t head_dim, double theta, const RopeScaling& scaling);

struct RopeTable {
  std::vector<float> cosine;  // [positions, head_dim / 2]
  std::vector<float> sine;    // likewise
};

// cos and sin of position * frequency: the product and the functions in float64, each value rounded
// once to fp32. positions <= 2^20.
RopeTable MakeRopeTable(int64_t positions, int32_t head_dim, double theta,
                        const RopeScaling& scaling);

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_ROPE_H_
