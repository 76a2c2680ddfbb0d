// One block of memory holds rows and their lists, then results and top lists. The former are copied
// to the GPU, the latter back.
#include "kernels/cuda/sm90/log_probs/transfer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {

bool IsRanked(const LogProbRequest& request) {
  const RowSampling& s = request.sampling;
  return request.top_logprobs > 0 || s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f;
}

namespace {

// Where each array of a call lies in the block.
struct Layout {
  size_t counts;
  size_t biases;
  size_t banned;
  size_t results;
  size_t top;
  size_t bytes;
  int32_t top_stride = 0;
  bool ranked_rows = false;

  explicit Layout(const LogProbsArgs& args) {
    size_t num_counts = 0;
    size_t num_biases = 0;
    size_t num_banned = 0;
    for (int64_t i = 0; i < args.num_rows; ++i) {
      const LogProbRequest& request = args.requests[i];
      const RowSampling& s = request.sampling;
      num_counts += s.counts.size();
      num_biases += s.biases.size();
      num_banned += s.banned.size();
      top_stride = std::max(top_stride, request.top_logprobs);
      ranked_rows |= IsRanked(request);
    }
    const auto rows = static_cast<size_t>(args.num_rows);
    counts = Align(rows * sizeof(DeviceLogProbRow));
    biases = Align(counts + num_counts * sizeof(TokenCount));
    banned = Align(biases + num_biases * sizeof(TokenBias));
    results = Align(banned + num_banned * sizeof(int32_t));
    top = Align(results + rows * sizeof(DeviceLogProbResult));
    bytes = top + rows * static_cast<size_t>(top_stride) * sizeof(TokenLogProb);
  }

 private:
  static size_t Align(size_t bytes) { return RoundUp(bytes, 16); }
};

// Appends a span to a flat array that holds `*size` elements.
template <typename T>
ListSpan Append(absl::Span<const T> span, T* array, int32_t* size) {
  std::copy(span.begin(), span.end(), array + *size);
  const ListSpan result{*size, static_cast<int32_t>(span.size())};
  *size += result.size;
  return result;
}

void WriteRows(const LogProbsArgs& args, const Layout& layout, std::byte* to) {
  auto* rows = reinterpret_cast<DeviceLogProbRow*>(to);
  int32_t num_counts = 0;
  int32_t num_biases = 0;
  int32_t num_banned = 0;
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const LogProbRequest& request = args.requests[i];
    const RowSampling& s = request.sampling;
    rows[i] = {
        .logits = args.logits + i * args.ld,
        .seed = s.seed,
        .sample = s.sample,
        .position = s.position,
        .temperature = s.temperature,
        .top_k = s.top_k,
        .top_p = s.top_p,
        .min_p = s.min_p,
        .repetition_penalty = s.repetition_penalty,
        .presence_penalty = s.presence_penalty,
        .frequency_penalty = s.frequency_penalty,
        .counts = Append(s.counts, reinterpret_cast<TokenCount*>(to + layout.counts), &num_counts),
        .biases = Append(s.biases, reinterpret_cast<TokenBias*>(to + layout.biases), &num_biases),
        .banned = Append(s.banned, reinterpret_cast<int32_t*>(to + layout.banned), &num_banned),
        .target = request.target,
        .top_logprobs = request.top_logprobs,
        .raw = request.raw,
        .want_entropy = request.want_entropy,
    };
  }
}

void ReadRows(const LogProbsArgs& args, const Layout& layout, int64_t begin, int64_t end,
              const std::byte* from) {
  const auto* results = reinterpret_cast<const DeviceLogProbResult*>(from + layout.results);
  const auto* top = reinterpret_cast<const TokenLogProb*>(from + layout.top);
  for (int64_t i = begin; i < end; ++i) {
    const LogProbRequest& request = args.requests[i];
    LogProbResult& to = args.results[i];
    const DeviceLogProbResult& result = results[i];
    to.finite = result.finite != 0;
    if (!to.finite) continue;
    to.token = {result.id, result.logprob};
    if (request.want_entropy) to.entropy = result.entropy;
    const TokenLogProb* const list = top + i * layout.top_stride;
    to.top.assign(list, list + request.top_logprobs);
  }
}

}  // namespace

LogProbTransfer::~LogProbTransfer() {
  // Nothing can be done about an error here: the process or the device is going away.
  static_cast<void>(cudaFreeHost(host_.data));
  static_cast<void>(cudaFree(device_.data));
  static_cast<void>(cudaFree(workspace_.data));
}

absl::Status LogProbTransfer::Reserve(int64_t num_rows, const Stream& stream) {
  const std::vector<LogProbRequest> plain(static_cast<size_t>(num_rows));
  const Layout layout({.requests = plain.data(), .num_rows = num_rows});
  return Grow(layout.bytes, LogProbWorkspaceBytes(num_rows), stream);
}

// Doubles each time: lists of counts grow with every token, and growing waits for the device.
absl::Status LogProbTransfer::Grow(size_t bytes, size_t workspace_bytes, const Stream& stream) {
  if (bytes > host_.bytes) {
    bytes = std::max(bytes, 2 * host_.bytes);
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaFreeHost(host_.data));
    host_ = {};
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMallocHost(reinterpret_cast<void**>(&host_.data), bytes));
    host_.bytes = bytes;
  }
  // Zeroed, because outputs are copied back whole, including those that no row asked for, and
  // because kernels expect a zeroed workspace, which they leave as they found it.
  const auto grow_zeroed = [&](Block& block, size_t size) -> absl::Status {
    if (size <= block.bytes) return absl::OkStatus();
    size = std::max(size, 2 * block.bytes);
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaFree(block.data));
    block = {};
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMalloc(reinterpret_cast<void**>(&block.data), size));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(block.data, 0, size, stream.handle));
    block.bytes = size;
    return absl::OkStatus();
  };
  ISOBIT_RETURN_IF_ERROR(grow_zeroed(device_, bytes));
  return grow_zeroed(workspace_, workspace_bytes);
}

absl::Status LogProbTransfer::Run(const LogProbsArgs& args, const Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(Launch(args, nullptr, stream));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream.handle));
  Read(args);
  return absl::OkStatus();
}

void LogProbTransfer::Read(const LogProbsArgs& args, int64_t begin, int64_t end) const {
  if (begin < end) ReadRows(args, Layout(args), begin, end, host_.data);
}

absl::Status LogProbTransfer::Launch(const LogProbsArgs& args, int32_t* ids, const Stream& stream) {
  if (args.num_rows == 0) return absl::OkStatus();
  ISOBIT_ASSIGN_OR_RETURN(const DeviceLogProbs sent, Send(args, ids, stream));
  ISOBIT_RETURN_IF_ERROR(LaunchLogProbs(sent, stream));
  return Fetch(args, stream);
}

absl::StatusOr<DeviceLogProbs> LogProbTransfer::Send(const LogProbsArgs& args, int32_t* ids,
                                                     const Stream& stream) {
  const Layout layout(args);
  if (layout.top_stride > kMaxTopLogProbs) {
    return absl::InvalidArgumentError(absl::StrCat("a list of ", layout.top_stride,
                                                   " top logprobs; at most ", kMaxTopLogProbs,
                                                   " are supported on a GPU"));
  }
  ISOBIT_RETURN_IF_ERROR(Grow(layout.bytes, LogProbWorkspaceBytes(args.num_rows), stream));
  WriteRows(args, layout, host_.data);
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(device_.data, host_.data, layout.results,
                                              cudaMemcpyHostToDevice, stream.handle));
  return DeviceLogProbs{
      .rows = reinterpret_cast<const DeviceLogProbRow*>(device_.data),
      .num_rows = args.num_rows,
      .vocab = args.vocab,
      .counts = reinterpret_cast<const TokenCount*>(device_.data + layout.counts),
      .biases = reinterpret_cast<const TokenBias*>(device_.data + layout.biases),
      .banned = reinterpret_cast<const int32_t*>(device_.data + layout.banned),
      .results = reinterpret_cast<DeviceLogProbResult*>(device_.data + layout.results),
      .ids = ids,
      .top = reinterpret_cast<TokenLogProb*>(device_.data + layout.top),
      .top_stride = layout.top_stride,
      .workspace = workspace_.data,
      .ranked_rows = layout.ranked_rows,
  };
}

absl::Status LogProbTransfer::Fetch(const LogProbsArgs& args, const Stream& stream) {
  const Layout layout(args);
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaMemcpyAsync(host_.data + layout.results, device_.data + layout.results,
                      layout.bytes - layout.results, cudaMemcpyDeviceToHost, stream.handle));
  return absl::OkStatus();
}

// Of a caller that keeps no transfer: allocates one, and so is slow.
absl::Status Run(const LogProbsArgs& args, const Stream& stream) {
  LogProbTransfer transfer;
  return transfer.Run(args, stream);
}

}  // namespace isobit::cuda
