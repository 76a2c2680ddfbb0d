// The scalar definition of logprobs and sampling for one row of logits (contract/sampling.h,
// contract/log_prob.h).
#ifndef ISOBIT_KERNELS_ORACLE_LOG_PROBS_H_
#define ISOBIT_KERNELS_ORACLE_LOG_PROBS_H_

#include "kernels/ops.h"

namespace isobit::oracle {

// logits: [vocab].
void ComputeLogProbs(const float* logits, int64_t vocab, const LogProbRequest& request,
                     LogProbResult& result);

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_LOG_PROBS_H_
