// The first tokens of a row in the filters' order (contract/sampling.h), without ranking the whole
// row.
#ifndef ISOBIT_KERNELS_CPU_TOP_TOKENS_H_
#define ISOBIT_KERNELS_CPU_TOP_TOKENS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/row_kernels.h"

namespace isobit::cpu {

// A row of logits (no NaN) with the maximum of each block of kVocabBlock.
struct BlockedRow {
  const float* z;
  int64_t vocab;
  const float* block_max;

  int64_t blocks() const { return (vocab + kVocabBlock - 1) / kVocabBlock; }
};

struct WeightedToken {
  uint64_t key;    // larger comes first; see KeyOf
  int64_t weight;  // contract::TokenWeight, if the caller needs it
};

// Keys order tokens as contract::Before does: by logit, then by lowest id.
uint64_t KeyOf(float logit, int32_t id);
int32_t IdOf(uint64_t key);

// Replaces *out with the first min(count, vocab) tokens, unordered except that the last one in
// order is at the end. count >= 1. Weights are unset. `scratch` is overwritten.
void SelectTop(const BlockedRow& row, int64_t count, std::vector<float>* scratch,
               std::vector<WeightedToken>* out);

// Replaces *out with all tokens whose logit is at least `threshold`. Weights are unset.
void CollectFrom(const BlockedRow& row, float threshold, std::vector<WeightedToken>* out);

// The last token of the shortest prefix, in order, whose weights sum to at least `bound` > 0. All
// weights of `tokens` must sum to at least the bound. Reorders `tokens`.
WeightedToken NucleusEnd(std::vector<WeightedToken>& tokens, int64_t bound);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_TOP_TOKENS_H_
