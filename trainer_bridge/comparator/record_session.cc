// Drives one Record call.
#include "trainer_bridge/comparator/record_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/comparator/pairing.h"

namespace isobit {

RecordSession::RecordSession(grpc::CallbackServerContext& context, CallGate& gate,
                             std::shared_ptr<History> history, v1::CompareSummary* summary,
                             HeldBytes memory)
    : context_(context),
      gate_(gate),
      history_(std::move(history)),
      comparison_(history_->Begin()),
      summary_(summary),
      memory_(std::move(memory)) {
  StartRead(&request_);
}

void RecordSession::OnReadDone(bool ok) {
  if (const absl::Status allowed = gate_.Recheck(context_); !allowed.ok()) {
    return Finish(ToGrpcStatus(allowed));
  }
  if (!ok) {  // the client has sent everything
    summary_->MergeFrom(builder_.Build());
    return Finish(grpc::Status::OK);
  }
  if (const absl::Status compared = Compare(); !compared.ok()) {
    return Finish(
        ToGrpcStatus(Annotate(compared, absl::StrCat("record ", num_records_)), context_));
  }
  ++num_records_;
  StartRead(&request_);
}

absl::Status RecordSession::Compare() {
  ISOBIT_RETURN_IF_ERROR(memory_.Resize(kCallBytes + request_.SpaceUsedLong()));
  ISOBIT_RETURN_IF_ERROR(CheckId("sequence_id", request_.sequence_id()));
  const v1::SideIdentity rollout = IdentityOf(request_.rollout());
  const v1::SideIdentity scorer = IdentityOf(request_.scorer());
  absl::Status comparable = CheckSides(rollout, scorer, request_.allow_weight_mismatch());
  if (comparable.ok()) {
    comparable = CheckTokens(request_.rollout().tokens(), request_.scorer().tokens(),
                             request_.allow_weight_mismatch());
  }
  if (!comparable.ok()) {
    history_->Refuse(comparable,
                     MissingTokens(request_.rollout().tokens(), request_.scorer().tokens()));
    return comparable;
  }
  if (num_records_ == 0) {
    *summary_->mutable_rollout() = rollout;
    *summary_->mutable_scorer() = scorer;
  }
  const std::string id =
      request_.sequence_id().empty() ? absl::StrCat(num_records_) : request_.sequence_id();
  const SequenceOutcome outcome =
      CompareTokens(id, request_.rollout().tokens(), request_.scorer().tokens());
  builder_.Add(outcome);
  history_->Add(outcome);
  return absl::OkStatus();
}

}  // namespace isobit
