// The scalar definition of the attention ops: q/k norm, rotation and KV write; and attention over a
// paged cache.
#ifndef ISOBIT_KERNELS_ORACLE_ATTENTION_H_
#define ISOBIT_KERNELS_ORACLE_ATTENTION_H_

#include <cstdint>

#include "kernels/ops.h"

namespace isobit::oracle {

void PrepareQkv(const QkvArgs& args);
void Attend(const AttentionArgs& args);
// The same, and for each row and head L of C13: log_sums[head * ld + row]; null: not computed.
void Attend(const AttentionArgs& args, float* log_sums, int64_t ld);

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_ATTENTION_H_
