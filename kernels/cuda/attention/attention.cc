// See attention.h.
#include "kernels/cuda/attention/attention.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "kernels/cuda/attention/decode.h"
#include "kernels/cuda/attention/prefill.h"

namespace isobit::cuda {
namespace {

constexpr int32_t kDecodeRows = 16;  // query rows of a KV head that one pass over its keys takes
// Up to so many passes, the decode schedule is faster for several rows than the prefill schedule.
// The latter makes one pass for many rows, but in a long context few multiprocessors do it all.
constexpr int64_t kDecodePasses = 160;
constexpr size_t kWorkspaceGoal = size_t{256} << 20;  // more than that only for single tokens

// Whether the decode schedule takes sequences of `tokens` rows, if the step holds as many of them
// as it can.
bool IsDecoded(const AttentionArgs& args, const DeviceSequences& sequences, int32_t tokens) {
  if (tokens == 1) return true;
  if (DecodeWorkspaceBytes(args, sequences, tokens) > kWorkspaceGoal) return false;
  const int64_t passes = CeilDiv(int64_t{tokens} * (args.heads / args.kv.kv_heads), kDecodeRows);
  const int64_t surplus = std::max(sequences.num_rows - sequences.num_sequences, 0);
  const int64_t count = std::min<int64_t>(sequences.num_sequences, CeilDiv(surplus, tokens - 1));
  return args.kv.kv_heads * count * passes <= kDecodePasses;
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

}  // namespace isobit::cuda
