// The scalar definition of logprobs and sampling for one row of logits (contract/sampling.h,
// contract/log_prob.h).
#ifndef ISOBIT_KERNELS_ORACLE_LOG_PROBS_H_
#define ISOBIT_KERNELS_ORACLE_LOG_PROBS_H_

#include <cstdint>
#include <vector>

#include "kernels/contract/log_prob.h"
#include "kernels/ops/log_probs.h"

namespace isobit::oracle {

// Steps 1 to 6 of C8: the row [vocab], with -inf for filtered tokens; empty if the row fails.
std::vector<float> ProcessLogits(const float* logits, int64_t vocab, const RowSampling& sampling);

// C7's sum over all ranges of z.
contract::VocabSum SumVocab(const std::vector<float>& z);

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_LOG_PROBS_H_
