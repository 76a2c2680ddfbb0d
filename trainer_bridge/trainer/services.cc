// The calls to each service.
#include "trainer_bridge/trainer/services.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/weight_digest.h"
#include "common/rpc/channel.h"
#include "common/rpc/steady_time.h"
#include "common/rpc/weight_stream.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/trainer/stop_signal.h"

namespace isobit::trainer {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kStartTimeout{60};
constexpr seconds kAskTimeout{5};
constexpr milliseconds kAskPause{100};
constexpr seconds kWorkTimeout{600};
constexpr size_t kPieceBytes = size_t{4} << 20;

// Whether a service that answers so may serve soon.
bool MayServeSoon(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// Asks a service until it has weights that serve. `info`: of the answer.
template <typename Info, typename Stub>
absl::StatusOr<v1::ServerInfo> WaitUntilServing(Stub& stub, const std::string& what) {
  const auto deadline = steady_clock::now() + kStartTimeout;
  absl::Status last;
  while (steady_clock::now() < deadline) {
    if (StopAsked()) return absl::CancelledError("stopped");
    grpc::ClientContext context;
    context.set_deadline(steady_clock::now() + kAskTimeout);
    Info info;
    last = FromGrpcStatus(stub.GetServerInfo(&context, v1::GetServerInfoRequest(), &info));
    if (last.ok() && !info.server().weight_version().digest().empty()) return info.server();
    if (last.ok()) last = absl::UnavailableError("it has no weights yet");
    if (!MayServeSoon(last)) break;
    std::this_thread::sleep_for(kAskPause);
  }
  return Annotate(last, what);
}

absl::Status CheckArithmetic(const v1::ServerInfo& info, const std::string& fingerprint,
                             const std::string& what) {
  if (info.numerics_mode() != v1::NUMERICS_MODE_TREE) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": expected --numerics=tree, got ",
                                                      v1::NumericsMode_Name(info.numerics_mode())));
  }
  if (info.fingerprint().hex() == fingerprint) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      what, ": expected the fingerprint of the trainer's model and arithmetic, ", fingerprint,
      ", got ", info.fingerprint().hex(), " of a ", info.model().architecture()));
}

v1::WeightChunk BeginOf(absl::Span<const Tensor> weights, uint64_t version) {
  v1::WeightChunk chunk;
  v1::WeightStreamBegin& begin = *chunk.mutable_begin();
  begin.set_weight_version(version);
  for (const Tensor& tensor : weights) {
    v1::StreamedTensor& told = *begin.add_tensors();
    told.set_name(tensor.name);
    told.set_dtype(SafetensorsName(tensor.dtype));
    for (const int64_t size : tensor.shape) told.add_shape(static_cast<uint64_t>(size));
  }
  return chunk;
}

// False: the service has ended the call, and its status says why.
template <typename Writer>
bool WritePieces(absl::Span<const Tensor> weights, Writer& writer) {
  v1::WeightChunk chunk;
  for (size_t i = 0; i < weights.size(); ++i) {
    for (size_t at = 0; at < weights[i].size_bytes; at += kPieceBytes) {
      v1::WeightPiece& piece = *chunk.mutable_piece();
      piece.set_tensor(static_cast<uint32_t>(i));
      piece.set_offset(at);
      piece.set_data(weights[i].data + at, std::min(kPieceBytes, weights[i].size_bytes - at));
      if (!writer.Write(chunk)) return false;
    }
  }
  return true;
}

template <typename Stub>
absl::Status SendTo(Stub& stub, absl::Span<const Tensor> weights,
                    const v1::WeightVersion& version) {
  grpc::ClientContext context;
  context.set_deadline(steady_clock::now() + kWorkTimeout);
  v1::UpdateWeightsResponse response;
  const auto writer = stub.UpdateWeightsFromStream(&context, &response);
  const bool has_begun = writer->Write(BeginOf(weights, version.id()));
  writer->WaitForInitialMetadata();
  const bool is_accepted = context.GetServerInitialMetadata().count(kWeightsAcceptedKey) > 0;
  if (has_begun && is_accepted && WritePieces(weights, *writer)) {
    v1::WeightChunk end;
    end.mutable_end()->set_expected_digest(version.digest());
    if (writer->Write(end)) writer->WritesDone();
  }
  ISOBIT_RETURN_IF_ERROR(FromGrpcStatus(writer->Finish(), context));
  const v1::WeightVersion& now = response.current();
  if (now.id() == version.id() && now.digest() == version.digest()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("expected weights ", version.id(), " (",
                                                    version.digest(), ") to serve, got ", now.id(),
                                                    " (", now.digest(), ")"));
}

}  // namespace

std::string DigestOf(absl::Span<const Tensor> weights) {
  std::map<std::string, ShapedDigest> digests;
  for (const Tensor& tensor : weights) digests[tensor.name] = {tensor.shape, TensorDigest(tensor)};
  return WeightDigest(digests);
}

absl::StatusOr<Services> Services::Connect(const ServiceAddresses& addresses,
                                           const std::string& fingerprint) {
  const auto channel = [&](const std::string& address) {
    return MakeChannel(address, kMaxMessageBytes, addresses.security);
  };
  Services services;
  services.rollout_ = v1::RolloutService::NewStub(channel(addresses.rollout));
  const std::string rollout = absl::StrCat("rollout ", addresses.rollout);
  ISOBIT_ASSIGN_OR_RETURN(const v1::ServerInfo info,
                          WaitUntilServing<v1::RolloutServerInfo>(*services.rollout_, rollout));
  ISOBIT_RETURN_IF_ERROR(CheckArithmetic(info, fingerprint, rollout));
  services.fingerprint_ = info.fingerprint();
  services.latest_version_ = info.weight_version().id();
  if (!addresses.scorer.empty()) {
    services.scorer_ = v1::ScorerService::NewStub(channel(addresses.scorer));
    const std::string scorer = absl::StrCat("scorer ", addresses.scorer);
    ISOBIT_ASSIGN_OR_RETURN(const v1::ServerInfo other,
                            WaitUntilServing<v1::ScorerServerInfo>(*services.scorer_, scorer));
    ISOBIT_RETURN_IF_ERROR(CheckArithmetic(other, fingerprint, scorer));
    if (other.fingerprint().settings() != info.fingerprint().settings()) {
      return absl::FailedPreconditionError(
          absl::StrCat(scorer, ": expected the rollout's model settings, ",
                       info.fingerprint().settings(), ", got ", other.fingerprint().settings()));
    }
    services.latest_version_ = std::max(services.latest_version_, other.weight_version().id());
  }
  if (!addresses.comparator.empty()) {
    services.comparator_ = v1::ComparatorService::NewStub(channel(addresses.comparator));
  }
  return services;
}

absl::Status Services::SendWeights(absl::Span<const Tensor> weights, const std::string& digest,
                                   int64_t step) {
  // Services take ids above those that they have had.
  if (!serving_) offset_ = latest_version_ + 1 - static_cast<uint64_t>(step);
  v1::WeightVersion version;
  version.set_id(offset_ + static_cast<uint64_t>(step));
  version.set_digest(digest);
  ISOBIT_RETURN_IF_ERROR(
      Annotate(SendTo(*rollout_, weights, version), "sending weights to the rollout"));
  if (scorer_) {
    ISOBIT_RETURN_IF_ERROR(
        Annotate(SendTo(*scorer_, weights, version), "sending weights to the scorer"));
  }
  serving_ = version;
  return absl::OkStatus();
}

absl::Status Services::Record(absl::Span<const v1::RecordSide> sides, const Logprobs& trainer,
                              const LogprobGap& gap) {
  if (!comparator_) return absl::OkStatus();
  grpc::ClientContext context;
  context.set_deadline(steady_clock::now() + kWorkTimeout);
  v1::CompareSummary summary;
  const auto writer = comparator_->Record(&context, &summary);
  v1::RecordRequest request;
  for (size_t i = 0; i < sides.size(); ++i) {
    *request.mutable_rollout() = sides[i];
    v1::RecordSide& ours = *request.mutable_scorer();
    *ours.mutable_fingerprint() = fingerprint_;
    *ours.mutable_weight_version() = *serving_;
    v1::TokenLogprobs& tokens = *ours.mutable_tokens();
    *tokens.mutable_token_ids() = sides[i].tokens().token_ids();
    tokens.mutable_logprobs()->Assign(trainer[i].begin(), trainer[i].end());
    tokens.mutable_weight_versions()->Resize(tokens.token_ids_size(), serving_->id());
    for (uint64_t& version : *tokens.mutable_weight_versions()) version = serving_->id();
    if (!writer->Write(request)) break;
  }
  writer->WritesDone();
  ISOBIT_RETURN_IF_ERROR(
      Annotate(FromGrpcStatus(writer->Finish(), context), "recording at the comparator"));
  const v1::GapStatistics& found = summary.statistics();
  if (found.num_tokens() == static_cast<uint64_t>(gap.tokens) &&
      found.num_unequal() == static_cast<uint64_t>(gap.unequal)) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("the comparator found ", found.num_unequal(), " of ",
                                          found.num_tokens(), " tokens unequal, the trainer ",
                                          gap.unequal, " of ", gap.tokens));
}

}  // namespace isobit::trainer
