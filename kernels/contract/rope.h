// C5: the rotary table. Made once, on the host and in float64, by code of our own, because the math
// libraries of machines differ.
#ifndef ISOBIT_KERNELS_CONTRACT_ROPE_H_
#define ISOBIT_KERNELS_CONTRACT_ROPE_H_

#include <cstdint>
#include <vector>

namespace isobit::contract {

struct RopeScaling {
  enum class Type : int32_t { kNone = 0, kLinear = 1, kLlama3 = 2, kYarn = 3 };
  Type type = Type::kNone;
  double factor = 1.0;                     // at least 1
  double original_max_positions = 8192.0;  // kLlama3, kYarn
  // kLlama3 only.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // kYarn only. Pairs that rotate more than beta_fast times in original_max_positions keep their
  // frequency; those that rotate less than beta_slow times have it divided by factor. With
  // truncate, the bounds between them are whole pairs.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;
  double attention_factor = 0.0;  // 0: from factor, and from the two below if neither is 0
  double mscale = 0.0;
  double mscale_all_dim = 0.0;
};

// The angle per position of each of the head_dim / 2 pairs: theta^(-2i/head_dim), scaled, and
// rounded to fp32 as in Hugging Face. The rules of llama3 and yarn are those of transformers'
// modeling_rope_utils; yarn needs theta > 1.
std::vector<float> InverseFrequencies(int32_t head_dim, double theta, const RopeScaling& scaling);

// The factor of every cosine and sine: 1, or yarn's attention factor.
double AttentionFactor(const RopeScaling& scaling);

struct RopeTable {
  std::vector<float> cosine;  // [positions, head_dim / 2]
  std::vector<float> sine;    // likewise
};

// cos and sin of position * frequency, times AttentionFactor. Products and functions are computed
// in float64; each value is rounded once to fp32. positions <= 2^20.
RopeTable MakeRopeTable(int64_t positions, int32_t head_dim, double theta,
                        const RopeScaling& scaling);

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_ROPE_H_
