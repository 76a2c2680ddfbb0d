// The constants of the numeric contract. Each can change a bit, so each is hashed into the
// fingerprint (fingerprint.cc).
#ifndef ISOBIT_KERNELS_CONTRACT_CONSTANTS_H_
#define ISOBIT_KERNELS_CONTRACT_CONSTANTS_H_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit::contract {

inline constexpr int kContractVersion = 2;

// C1: products in one tensor-core step, fraction bits to which its terms are truncated, smallest
// exponent.
inline constexpr int kMmaK = 16;
inline constexpr int kMmaFractionBits = 25;
inline constexpr int kMmaMinExponent = -133;

// C3: the number of leaves of a dot product; also the largest tensor-parallel size.
inline constexpr int kLeaves = 8;
inline constexpr int kLeafUnit = 16;  // columns; also the unit in which C7 divides the vocabulary

// C5: the number of consecutive columns in a leaf of RMSNorm's sum of squares.
inline constexpr int kNormLeaf = 4;

// C6: keys in one online-softmax update, positions in one split, lanes of the row sum.
ISOBIT_HD constexpr int32_t KvTile(int32_t head_dim) { return head_dim <= 128 ? 128 : 64; }
inline constexpr int kSplit = 512;
inline constexpr int kRowSumLanes = 8;

// C7: softmax weights are integers, truncated to this many fraction bits, so the order of their sum
// does not matter.
inline constexpr int kWeightBits = 40;
inline constexpr int64_t kMaxVocab = int64_t{1} << 22;  // keeps the sum below 2^63

// C8: rounds of the counter-based generator.
inline constexpr int kPhiloxRounds = 10;

inline constexpr float kLog2E = 0x1.715476p+0f;

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_CONSTANTS_H_
