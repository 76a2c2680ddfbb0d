// Which sequences the decode schedule takes, and the launches.
#include "kernels/cuda/sm90/attention/attention.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/attention/decode.h"
#include "kernels/cuda/sm90/attention/prefill.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/paged_kv.h"

namespace isobit::cuda {
namespace {

// Up to so many passes, the decode schedule is faster than the prefill schedule also for sequences
// that it passes over several times. The latter makes one pass for many rows, but in a long context
// few multiprocessors do it all.
constexpr int64_t kDecodePasses = 512;
constexpr size_t kWorkspaceGoal = size_t{256} << 20;  // more only where single tokens need it

// Query rows of a KV head that one pass of the decode schedule over its keys takes.
int64_t DecodeRows(int32_t head_dim) { return head_dim <= 128 ? 16 : 8; }

// Sequences of so many rows that the step can hold.
int64_t MostSequences(const DeviceSequences& sequences, int32_t tokens) {
  const bool padded = sequences.min_rows == 0;  // sequences may have no row
  const int64_t surplus = std::max(sequences.num_rows - sequences.num_sequences, 0);
  return padded ? sequences.num_rows / tokens
                : std::min<int64_t>(sequences.num_sequences, CeilDiv(surplus, tokens - 1));
}

// Whether the decode schedule takes sequences of `tokens` rows, if the step holds as many of them
// as it can.
bool IsDecoded(const AttentionArgs& args, const DeviceSequences& sequences, int32_t tokens) {
  if (tokens == 1) return true;
  const size_t bytes = DecodeWorkspaceBytes(args, sequences, tokens);
  if (bytes > std::max(kWorkspaceGoal, DecodeWorkspaceBytes(args, sequences, 1))) return false;
  const int64_t rows = int64_t{tokens} * (args.heads / args.kv.kv_heads);
  const int64_t passes = CeilDiv(rows, DecodeRows(args.kv.head_dim));
  return passes == 1 ||
         args.kv.kv_heads * passes * MostSequences(sequences, tokens) <= kDecodePasses;
}

// The decode schedule takes sequences of up to so many rows.
int32_t DecodeTokens(const AttentionArgs& args, const DeviceSequences& sequences) {
  int32_t tokens = 1;
  while (tokens < sequences.max_rows) {
    const int32_t more = std::min(2 * tokens, sequences.max_rows);
    if (!IsDecoded(args, sequences, more)) break;
    tokens = more;
  }
  return tokens;
}

bool IsEmpty(const AttentionArgs& args, const DeviceSequences& sequences) {
  return args.heads == 0 || sequences.num_sequences == 0 || sequences.max_rows == 0;
}

bool NeedsDecode(const AttentionArgs& args, const DeviceSequences& sequences) {
  return sequences.min_rows <= DecodeTokens(args, sequences);
}

}  // namespace

size_t AttentionWorkspaceBytes(const AttentionArgs& args) {
  const DeviceSequences& sequences = *args.sequences.device;
  if (IsEmpty(args, sequences) || !NeedsDecode(args, sequences)) return 0;
  return DecodeWorkspaceBytes(args, sequences, DecodeTokens(args, sequences));
}

absl::Status LaunchAttention(const AttentionArgs& args, const AttentionWorkspace& workspace,
                             const Stream& stream) {
  if (args.sequences.device == nullptr) {
    return absl::InvalidArgumentError(
        "attention needs the sequences' tables in GPU memory; args.sequences.device is null");
  }
  const DeviceSequences& sequences = *args.sequences.device;
  if (IsEmpty(args, sequences)) return absl::OkStatus();
  const PagedKv& kv = args.kv;
  if (kv.head_dim < 2 || kv.head_dim % 2 != 0 || kv.head_dim > kMaxHeadDim || kv.kv_heads < 1 ||
      args.heads % kv.kv_heads != 0 || kv.page_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention with head_dim ", kv.head_dim, ", ", args.heads, " heads, ", kv.kv_heads,
        " KV heads, page size ", kv.page_size, ": head_dim must be even and at most ", kMaxHeadDim,
        ", the heads a multiple of the KV heads"));
  }
  if (const size_t needed = AttentionWorkspaceBytes(args); workspace.bytes < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention with ", workspace.bytes, " bytes of workspace; needs ", needed));
  }
  const int32_t decode_tokens = DecodeTokens(args, sequences);
  if (NeedsDecode(args, sequences)) {
    absl::Status status = LaunchDecodeAttention(args, sequences, decode_tokens, workspace, stream);
    if (!status.ok()) return status;
  }
  if (sequences.max_rows <= decode_tokens) return absl::OkStatus();
  if (HasPrefillSchedule(kv.head_dim)) {
    return LaunchPrefillAttention(args, sequences, decode_tokens + 1, stream);
  }
  return LaunchWalkAttention(args, sequences, decode_tokens + 1, stream);
}

absl::Status Run(const AttentionArgs& args, const Stream& stream) {
  const size_t bytes = AttentionWorkspaceBytes(args);
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace, ScratchOf(stream, bytes));
  return LaunchAttention(args, {workspace, bytes}, stream);
}

}  // namespace isobit::cuda
