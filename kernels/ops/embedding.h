// The rows of an embedding table, and the gradient of the table.
#ifndef ISOBIT_KERNELS_OPS_EMBEDDING_H_
#define ISOBIT_KERNELS_OPS_EMBEDDING_H_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/ops/packs.h"

namespace isobit {

struct EmbeddingArgs {
  const int32_t* ids = nullptr;  // [rows], each in [0, vocab)
  int64_t rows = 0;
  const Bf16* table = nullptr;  // [vocab, hidden]
  int64_t hidden = 0;
  Bf16* out = nullptr;  // [rows, hidden]
};

// Which token rows have which id: rows[starts[i]] .. rows[starts[i + 1] - 1], ascending, have
// ids[i]. All are in the backend's memory.
struct EmbeddingRows {
  const int32_t* ids = nullptr;     // [num_ids], each id once
  const int32_t* starts = nullptr;  // [num_ids + 1]
  const int32_t* rows = nullptr;    // [token rows]
  int64_t num_ids = 0;
};
struct EmbeddingGradientArgs {
  const Bf16* dy = nullptr;  // [token rows, hidden]
  int64_t hidden = 0;
  EmbeddingRows table;
  PackBounds packs;
  // lm_head's pack sums for these ids, [packs][num_ids][hidden]; null: +0.
  const float* head_sums = nullptr;
  float* dtable = nullptr;  // [vocab, hidden]; only the rows of `ids` are written
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_EMBEDDING_H_
