// The push: a row-parallel linear layer itself stores its partial sums in the mailboxes of the
// ranks that add them up. Without it, the sum over ranks (sm90/collective/all_reduce.cuh) reads
// them from memory and sends them there.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_PARTIAL_PUSH_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_PARTIAL_PUSH_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/rank_signals.cuh"

namespace isobit {

// Where the partials of the next sum go.
struct PartialPush {
  cuda::RankGroup group;
  size_t mailbox_bytes;  // two mailboxes follow the RankSignals
  int32_t quads;         // per row; a quad is four columns
  bool two_shots;        // row r goes only to rank r % group.size; otherwise to all ranks
  double us_of_row;      // expected time for a row's partials to arrive; 0: unknown
};

namespace cuda {

inline constexpr int kMailboxQuads = 32;  // per piece of a row
inline constexpr uint32_t kEmpty = ~0u;   // a word of a mailbox that is not written
inline constexpr uint32_t kAnyNan = 0x7fffffffu;

// Maps every NaN to one that is not kEmpty. All NaNs become the same bf16 later.
__device__ __forceinline__ uint32_t Sendable(uint32_t v) {
  return (v & 0x7fffffffu) > 0x7f800000u ? kAnyNan : v;
}

__host__ __device__ __forceinline__ int32_t PiecesOf(int32_t quads) {
  return (quads + kMailboxQuads - 1) / kMailboxQuads;
}

// The offset of operation `number`'s mailbox in a rank's memory.
__device__ __forceinline__ size_t MailboxOf(uint32_t number, size_t mailbox_bytes) {
  return sizeof(RankSignals) + number % 2 * mailbox_bytes;
}

// The address in a mailbox of a quad of fp32 row `slot` from rank 0; rank q's is q * kMailboxQuads
// quads further. The ranks' pieces of a row are adjacent: a reader needs one address for all ranks,
// and a writer fills 512 bytes at once.
__device__ __forceinline__ uint4* FloatSlotOf(std::byte* mailbox, int slot, int pieces, int ranks,
                                              int quad) {
  const int piece = slot * pieces + quad / kMailboxQuads;
  return reinterpret_cast<uint4*>(mailbox) +
         (static_cast<uint32_t>(piece * ranks * kMailboxQuads) + quad % kMailboxQuads);
}

// The number of the next sum. Call it after WaitForPredecessor.
__device__ __forceinline__ uint32_t NextOperation(const PartialPush& push) {
  return LoadRelaxed(&push.group.signals(push.group.rank)->ended);
}

__device__ __forceinline__ uint4 WordsOf(float4 sum) {
  return {Sendable(contract::BitsOf(sum.x)), Sendable(contract::BitsOf(sum.y)),
          Sendable(contract::BitsOf(sum.z)), Sendable(contract::BitsOf(sum.w))};
}

// The address of quad 0 of fp32 row `slot` in rank `to`'s mailbox. Quad q is OffsetOf quads on.
__device__ __forceinline__ uint4* PushedRow(const PartialPush& push, uint32_t operation, int to,
                                            int slot) {
  const RankGroup& group = push.group;
  std::byte* const mailbox = group.memory[to] + MailboxOf(operation, push.mailbox_bytes);
  return FloatSlotOf(mailbox, slot, PiecesOf(push.quads), group.size, 0) +
         group.rank * kMailboxQuads;
}
// The same for row `row` of two shots.
__device__ __forceinline__ uint4* OwnersRow(const PartialPush& push, uint32_t operation, int row) {
  return PushedRow(push, operation, row % push.group.size, row / push.group.size);
}
__device__ __forceinline__ int OffsetOf(const PartialPush& push, int quad) {
  return quad / kMailboxQuads * push.group.size * kMailboxQuads + quad % kMailboxQuads;
}

// The distance from a row to the one 8 rows below it in the same mailbox, in quads. In two shots
// that row has the same owner, 8 / group.size rows further, as the number of ranks divides 8.
__device__ __forceinline__ int EightRowsOf(const PartialPush& push) {
  return 8 * PiecesOf(push.quads) * kMailboxQuads * (push.two_shots ? 1 : push.group.size);
}

// Sends a quad of row `row` for operation `operation`, also to this rank's own mailbox. Skips quads
// beyond the row; columns beyond the row in its last quad may have any value.
__device__ __forceinline__ void PushQuad(const PartialPush& push, uint32_t operation, int row,
                                         int quad, float4 sum) {
  if (quad >= push.quads) return;
  const uint4 words = WordsOf(sum);
  const int offset = OffsetOf(push, quad);
  if (push.two_shots) return StoreRelaxed(OwnersRow(push, operation, row) + offset, words);
  const RankGroup& group = push.group;
#pragma unroll 1
  for (int d = 1; d <= group.size; ++d) {
    StoreRelaxed(PushedRow(push, operation, (group.rank + d) % group.size, row) + offset, words);
  }
}

// The same for a quad of each of the rows row, row + 8, ... that are below end_row.
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
  uint4* const at = OwnersRow(push, operation, row) + OffsetOf(push, quad);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (row + 8 * i < end_row) StoreRelaxed(at + i * EightRowsOf(push), WordsOf(sums[i]));
  }
}

}  // namespace cuda
}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_PARTIAL_PUSH_CUH_
