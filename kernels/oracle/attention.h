// The scalar definition of attention over a paged cache.
#ifndef ISOBIT_KERNELS_ORACLE_ATTENTION_H_
#define ISOBIT_KERNELS_ORACLE_ATTENTION_H_

#include <cstdint>

#include "kernels/ops/attention.h"

namespace isobit::oracle {

// Attention, and for each row and head L of C13: log_sums[head * ld + row]; null: not computed.
void Attend(const AttentionArgs& args, float* log_sums, int64_t ld);

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_ATTENTION_H_
