// Reads a stream of weights message by message, and refuses what comes out of order.
#include "common/rpc/weight_stream.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/strict_json.h"  // Quoted
#include "proto/isobit/status_convert.h"

namespace isobit {
namespace {

std::optional<WeightBlocks> BlocksOf(const v1::WeightStreamBegin& begin) {
  WeightBlocks blocks;
  if (begin.has_cuda_ipc()) {
    blocks.handles.assign(begin.cuda_ipc().handles().begin(), begin.cuda_ipc().handles().end());
  } else if (begin.has_nccl()) {
    const v1::NcclWeights& nccl = begin.nccl();
    blocks.senders = {.group_ids = {nccl.group_ids().begin(), nccl.group_ids().end()},
                      .num_senders = static_cast<int>(nccl.num_senders()),
                      .has_joined = nccl.has_joined(),
                      .nccl_version = nccl.nccl_version()};
  } else {
    return std::nullopt;
  }
  // What is beyond int64 becomes negative, and is refused as such.
  for (const v1::WeightBlock& block :
       begin.has_nccl() ? begin.nccl().blocks() : begin.cuda_ipc().blocks()) {
    const auto columns = static_cast<int64_t>(block.num_columns());
    blocks.blocks.push_back(
        {.tensor = block.tensor(),
         .first_row = static_cast<int64_t>(block.first_row()),
         .num_rows = static_cast<int64_t>(block.num_rows()),
         .first_column = static_cast<int64_t>(block.first_column()),
         .num_columns = columns,
         .holder = block.memory(),
         .offset = begin.has_nccl() ? 0 : block.offset(),
         .row_stride = begin.has_nccl() ? columns : static_cast<int64_t>(block.row_stride())});
  }
  return blocks;
}

absl::Status SenderHasGone() { return absl::CancelledError("the sender has gone"); }

}  // namespace

absl::StatusOr<std::vector<Tensor>> TensorsFromProto(
    const google::protobuf::RepeatedPtrField<v1::StreamedTensor>& list) {
  std::vector<Tensor> tensors;
  for (const v1::StreamedTensor& listed : list) {
    const std::optional<DType> dtype = DTypeFromSafetensors(listed.dtype());
    if (!dtype) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", Quoted(listed.name()), ": dtype ",
                                                     Quoted(listed.dtype()),
                                                     ", expected BF16, F16 or F32"));
    }
    // An extent beyond int64 becomes negative, and is refused as such.
    tensors.push_back({.name = listed.name(),
                       .dtype = *dtype,
                       .shape = {listed.shape().begin(), listed.shape().end()}});
  }
  return tensors;
}

WeightStream* WeightStream::Start(grpc::CallbackServerContext* context, CallGate& gate,
                                  Options options) {
  const absl::Status admitted = gate.Admit(*context, {.requests = 1});
  if (!admitted.ok()) return Refuse(context, gate, admitted);
  const std::shared_ptr<WeightStream> call(new WeightStream(context, gate, std::move(options)));
  call->self_ = call;
  call->Receive();
  return call.get();
}

WeightStream* WeightStream::Refuse(grpc::CallbackServerContext* context, CallGate& gate,
                                   const absl::Status& status) {
  const std::shared_ptr<WeightStream> call(new WeightStream(context, gate, {}));
  call->self_ = call;
  call->Answer(status);
  return call.get();
}

void WeightStream::Answer(const absl::Status& status) {
  if (!status.ok()) ISOBIT_LOG(Warning) << "refused weights by stream: " << status.ToString();
  const std::lock_guard lock(mutex_);
  answered_ = true;
  Finish(ToGrpcStatus(status, context_));
}

void WeightStream::Accept() {
  const std::lock_guard lock(mutex_);
  if (answered_) return;
  context_.AddInitialMetadata(kWeightsAcceptedKey, "1");
  StartSendInitialMetadata();
}

void WeightStream::Receive() {
  const std::lock_guard lock(mutex_);
  if (!answered_) StartRead(&chunk_);
}

void WeightStream::OnReadDone(bool ok) {
  const std::shared_ptr<WeightStream> self = self_;
  const absl::Status taken =
      ok              ? Take()
      : is_abandoned_ ? SenderHasGone()
                      : absl::InvalidArgumentError("the stream broke off before its end");
  if (source_ == nullptr) return Answer(taken);
  if (!taken.ok()) return source_->Fail(taken);
  source_->WhenWanted([self] { self->Receive(); });
}

absl::Status WeightStream::Take() {
  switch (chunk_.chunk_case()) {
    case v1::WeightChunk::kBegin:
      return Begin(chunk_.begin());
    case v1::WeightChunk::kPiece:
      if (source_ == nullptr) return absl::InvalidArgumentError("expected a begin, got a piece");
      return source_->Add(chunk_.piece().tensor(), chunk_.piece().offset(),
                          std::move(*chunk_.mutable_piece()->mutable_data()));
    case v1::WeightChunk::kEnd:
      if (source_ == nullptr) return absl::InvalidArgumentError("expected a begin, got an end");
      return source_->End(chunk_.end().expected_digest());
    case v1::WeightChunk::CHUNK_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("expected a begin, a piece or an end, got none of them");
}

absl::Status WeightStream::Begin(const v1::WeightStreamBegin& begin) {
  if (source_ != nullptr) return absl::InvalidArgumentError("expected one begin, got a second");
  v1::UpdateWeightsRequest request;
  request.set_in_flight_mode(begin.in_flight_mode());
  if (begin.has_cuda_ipc() && begin.has_nccl()) {
    return absl::InvalidArgumentError("expected cuda_ipc or nccl, got both");
  }
  if (begin.has_weight_version()) request.set_weight_version(begin.weight_version());
  ISOBIT_ASSIGN_OR_RETURN(WeightUpdate update, options_.parse(request));
  ISOBIT_ASSIGN_OR_RETURN(std::vector<Tensor> tensors, TensorsFromProto(begin.tensors()));
  ISOBIT_ASSIGN_OR_RETURN(auto source,
                          StreamedSource::Create(std::move(tensors), options_.plan, options_.policy,
                                                 options_.limits, BlocksOf(begin)));
  {
    const std::lock_guard lock(mutex_);
    source_ = source;
  }
  if (is_abandoned_) source->Fail(SenderHasGone());  // OnCancel may have missed it
  update.stream = std::move(source);
  update.is_abandoned = [self = self_] { return self->is_abandoned(); };
  update.on_begun = [self = self_] { self->Accept(); };
  options_.begin(std::move(update), self_);
  return absl::OkStatus();
}

void WeightStream::OnCancel() {
  is_abandoned_ = true;
  std::shared_ptr<StreamedSource> source;
  {
    const std::lock_guard lock(mutex_);
    source = source_;
  }
  if (source != nullptr) source->Fail(SenderHasGone());
  if (options_.on_abandoned) options_.on_abandoned();
}

void WeightStream::OnDone() {
  const std::shared_ptr<WeightStream> self = std::move(self_);
  // A source that was never read still waits for a reader, with a callback that owns this object.
  if (source_ != nullptr) source_->Fail(SenderHasGone());
}

}  // namespace isobit
