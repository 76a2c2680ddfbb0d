// The arguments of all ops, for code that is made of the whole list.
#ifndef ISOBIT_KERNELS_OPS_ALL_H_
#define ISOBIT_KERNELS_OPS_ALL_H_

// IWYU pragma: begin_exports
#include "kernels/ops/attention.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/log_probs.h"
#include "kernels/ops/losses.h"
#include "kernels/ops/op_list.h"
#include "kernels/ops/optimizer.h"
#include "kernels/ops/packs.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/qkv.h"
#include "kernels/ops/reduce.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/swiglu.h"
#include "kernels/ops/weight_sums.h"
// IWYU pragma: end_exports

#endif  // ISOBIT_KERNELS_OPS_ALL_H_
