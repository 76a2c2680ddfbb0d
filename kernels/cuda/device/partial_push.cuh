// A row-parallel linear layer's partial sums, stored by the layer itself into the mailboxes of the
// ranks that add them up: the words that the sum over ranks (collective/all_reduce.cuh) would
// otherwise read from memory and send there.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_PARTIAL_PUSH_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_PARTIAL_PUSH_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/cuda/device/rank_signals.cuh"

namespace isobit {

// Where the partials of the next sum go.
struct PartialPush {
  cuda::RankGroup group;
  size_t mailbox_bytes;  // two mailboxes follow the RankSignals
  int32_t quads;         // four columns each, of a row
  bool two_shots;        // row r goes to rank r % group.size alone, else every row to all
};

namespace cuda {

inline constexpr int kMailboxQuads = 32;  // of a piece of a row
inline constexpr uint32_t kEmpty = ~0u;   // a word of a mailbox that nobody has written
inline constexpr uint32_t kAnyNan = 0x7fffffffu;

// Every NaN as one that is not kEmpty. All of them end as the same bf16.
__device__ __forceinline__ uint32_t Sendable(uint32_t v) {
  return (v & 0x7fffffffu) > 0x7f800000u ? kAnyNan : v;
}

__host__ __device__ __forceinline__ int32_t PiecesOf(int32_t quads) {
  return (quads + kMailboxQuads - 1) / kMailboxQuads;
}

// The mailbox of operation `number`, from the start of a rank's memory.
__device__ __forceinline__ size_t MailboxOf(uint32_t number, size_t mailbox_bytes) {
  return sizeof(RankSignals) + number % 2 * mailbox_bytes;
}

// Where a mailbox has a quad of fp32 row `slot` from rank 0; rank q's is q * kMailboxQuads quads
// on. Ranks lie side by side in pieces, so that a reader needs one address for all and a writer
// fills 512 bytes at once.
__device__ __forceinline__ uint4* FloatSlotOf(std::byte* mailbox, int slot, int pieces, int ranks,
                                              int quad) {
  const int piece = slot * pieces + quad / kMailboxQuads;
  return reinterpret_cast<uint4*>(mailbox) +
         (static_cast<uint32_t>(piece * ranks * kMailboxQuads) + quad % kMailboxQuads);
}

// The number of the sum that comes next. After WaitForPredecessor.
__device__ __forceinline__ uint32_t NextOperation(const PartialPush& push) {
  return LoadRelaxed(&push.group.signals(push.group.rank)->ended);
}

__device__ __forceinline__ uint4 WordsOf(float4 sum) {
  return {Sendable(contract::BitsOf(sum.x)), Sendable(contract::BitsOf(sum.y)),
          Sendable(contract::BitsOf(sum.z)), Sendable(contract::BitsOf(sum.w))};
}

// Sends a quad of row `row` for operation `operation`; the own rank gets it through its mailbox
// too. Quads beyond the row are left out; columns beyond it, in its last quad, may be anything.
__device__ __forceinline__ void PushQuad(const PartialPush& push, uint32_t operation, int row,
                                         int quad, float4 sum) {
  if (quad >= push.quads) return;
  const uint4 words = WordsOf(sum);
  const RankGroup& group = push.group;
  const size_t mailbox = MailboxOf(operation, push.mailbox_bytes);
  const auto send = [&](int to, int slot) {
    uint4* const at =
        FloatSlotOf(group.memory[to] + mailbox, slot, PiecesOf(push.quads), group.size, quad);
    StoreRelaxed(at + group.rank * kMailboxQuads, words);
  };
  if (push.two_shots) return send(row % group.size, row / group.size);
#pragma unroll 1
  for (int d = 1; d <= group.size; ++d) send((group.rank + d) % group.size, row);
}

// Likewise a quad of each of the rows row, row + 8, ..., less those from end_row on.
template <int kRows>
__device__ __forceinline__ void PushQuads(const PartialPush& push, uint32_t operation, int row,
                                          int end_row, int quad, const float4 (&sums)[kRows]) {
  if (!push.two_shots) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + 8 * i < end_row) PushQuad(push, operation, row + 8 * i, quad, sums[i]);
    }
    return;
  }
  if (quad >= push.quads) return;
  // The number of ranks divides 8: the rows are all one rank's, and equally far apart there.
  const RankGroup& group = push.group;
  const int pieces = PiecesOf(push.quads);
  uint4* const at =
      FloatSlotOf(group.memory[row % group.size] + MailboxOf(operation, push.mailbox_bytes),
                  row / group.size, pieces, group.size, quad);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (row + 8 * i < end_row) {
      StoreRelaxed(at + group.rank * kMailboxQuads + i * 8 * pieces * kMailboxQuads,
                   WordsOf(sums[i]));
    }
  }
}

}  // namespace cuda
}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_PARTIAL_PUSH_CUH_
