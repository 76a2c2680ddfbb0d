// The scalar definition of the attention ops: q/k norm, rotation and KV write; and attention over a
// paged cache.
#ifndef ISOBIT_KERNELS_ORACLE_ATTENTION_H_
#define ISOBIT_KERNELS_ORACLE_ATTENTION_H_

#include "kernels/ops.h"

namespace isobit::oracle {

void PrepareQkv(const QkvArgs& args);
void Attend(const AttentionArgs& args);

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_ATTENTION_H_
