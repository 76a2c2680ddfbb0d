// Attention over the paged cache: q/k norm, rotation and KV write; and softmax(q k^T) v.
//
// Prefill, decode and scoring use the same schedule: a block of rows (a KV head's query heads times
// some consecutive tokens) passes over tiles of keys. Only the number of rows in a block differs,
// and that changes no bit.
#ifndef ISOBIT_KERNELS_CPU_ATTENTION_H_
#define ISOBIT_KERNELS_CPU_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/attention.h"

namespace isobit::cpu {

// Normalises (unless weight is null) and rotates `count` adjacent heads, in place. cosine, sine:
// [head_dim / 2].
void PrepareHeads(const RowKernels& rows, int64_t count, int64_t head_dim, const Bf16* weight,
                  float eps, const float* cosine, const float* sine, Bf16* heads);
// Sets k = NaN and v = +0, both [head_dim], if v has a value that is not finite (C6).
void PoisonHead(int64_t head_dim, Bf16* k, Bf16* v);

class AttentionOp {
 public:
  AttentionOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool);
  ~AttentionOp();

  void Run(const AttentionArgs& args) { Run(args, nullptr, 0); }
  // The same, and for each row and head L of C13: log_sums[head * ld + row]; null: not computed.
  void Run(const AttentionArgs& args, float* log_sums, int64_t ld);

 private:
  // The rows of one pass over the keys: consecutive
  // tokens of one sequence, for one KV head.
  struct Block {
    const SequenceRows* sequence;
    int32_t kv_head;
    int64_t first_token;  // of the sequence's rows
    int64_t tokens;
  };
  struct Sizes;
  struct Scratch;

  void RunBlock(const AttentionArgs& args, const Sizes& sizes, const Block& block,
                Scratch& scratch) const;
  void WriteLogSums(const Sizes& sizes, const Block& block, const Scratch& scratch, float* log_sums,
                    int64_t ld) const;
  // Adds the tile of keys [begin, begin + tile) to those rows of the block that see any of its
  // keys.
  void RunTile(const AttentionArgs& args, const Sizes& sizes, const Block& block, int64_t begin,
               Scratch& scratch) const;

  MmaPanelsFn mma_;
  const RowKernels& rows_;
  ThreadPool& pool_;
  std::vector<Block> blocks_;
  std::vector<Scratch> scratch_;  // one for each worker
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_ATTENTION_H_
