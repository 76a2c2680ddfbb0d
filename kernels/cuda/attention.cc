// See attention.h.
#include "kernels/cuda/attention.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attention_decode.h"
#include "kernels/cuda/attention_prefill.h"

namespace isobit::cuda {
namespace {

// Query rows of a KV head up to which a sequence is decoded: one pass over its keys takes 16, and
// four passes are still faster than the prefill schedule's one, which cannot split a long context.
constexpr int32_t kDecodeRows = 16;
constexpr int32_t kDecodeRowsOfLong = 64;
constexpr int32_t kLongContext = 4096;
constexpr size_t kWorkspaceGoal = size_t{256} << 20;  // more than that only for single tokens

// Rows up to which a sequence is decoded.
int32_t DecodeTokens(const AttentionArgs& args, const DeviceSequences& sequences) {
  const int32_t group = args.heads / args.kv.kv_heads;
  const int32_t rows = sequences.max_positions > kLongContext ? kDecodeRowsOfLong : kDecodeRows;
  int32_t tokens = std::clamp(rows / group, 1, sequences.max_rows);
  while (tokens > 1 && DecodeWorkspaceBytes(args, sequences, tokens) > kWorkspaceGoal) tokens /= 2;
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
    return absl::InvalidArgumentError("attention without the sequences' device tables");
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
