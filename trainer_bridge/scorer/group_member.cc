// The stream to the leader, and what each of its messages starts.
#include "trainer_bridge/scorer/group_member.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/rpc/channel.h"
#include "kernels/model/numerics.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/prepare_weights.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/scorer/group_messages.h"

namespace isobit {

// Sends one sequence's result to the leader.
class GroupMember::Forwarder final : public ScoreReceiver {
 public:
  Forwarder(GroupMember& member, int rank, int index)
      : member_(member), rank_(rank), index_(index) {}

  void OnScore(SequenceScore score) override { Send(MakeScored(score)); }
  void OnDone(const absl::Status& status) override {
    if (status.ok()) return;
    v1::SequenceScored scored;
    *scored.mutable_outcome() = MakeOutcome(status);
    Send(std::move(scored));
  }
  bool CanTakeMore() const override { return true; }

 private:
  void Send(v1::SequenceScored scored) {
    scored.set_rank(rank_);
    scored.set_index(index_);
    v1::MemberMessage message;
    *message.mutable_scored() = std::move(scored);
    member_.Send(message);
  }

  GroupMember& member_;
  const int rank_;
  const int index_;
};

absl::Status GroupMember::Run() {
  const ScorerOptions& scorer = options_.scorer;
  ISOBIT_ASSIGN_OR_RETURN(
      const OpenedModel model,
      OpenModelAs(scorer.load_format, scorer.model_root, options_.model, scorer.load_policy));
  const int64_t max_context =
      scorer.max_context > 0 ? scorer.max_context : model.config.max_position_embeddings;
  ISOBIT_RETURN_IF_ERROR(Join({.fingerprint = FingerprintOf(model.config, scorer.numerics),
                               .settings = model.config.Settings(),
                               .max_context = max_context,
                               .prefix_sharing = scorer.prefix_sharing}));
  v1::LeaderMessage message;
  absl::Status status;
  bool in_order = false;
  if (stream_->Read(&message) && message.has_welcome()) {
    status = Load(model, max_context, message.welcome().nccl_id());
    v1::MemberMessage ready;
    *ready.mutable_ready()->mutable_outcome() = MakeOutcome(status);
    if (status.ok()) ready.mutable_ready()->set_digest(serving_->version.digest);
    Send(ready);
    if (status.ok()) {
      if (options_.on_ready) options_.on_ready();
      in_order = Obey();
    }
  }
  EndWrites();  // not TryCancel, which could overtake the message of this process's failure
  while (stream_->Read(&message)) {  // a goodbye, without whose reading Finish would not return
  }
  const absl::Status end = FromGrpcStatus(stream_->Finish(), context_);
  if (status.ok() && !in_order) {
    status = end.ok() ? absl::UnavailableError("shard group: the leader has gone")
                      : Annotate(end, "shard group: the leader ended it");
  }
  if (!status.ok() && ranks_ != nullptr) ranks_->Abort(status);
  if (pass_.valid()) pass_.wait();
  const std::lock_guard lock(mutex_);
  return failure_.ok() ? status : failure_;
}

void GroupMember::Cancel() { context_.TryCancel(); }

absl::Status GroupMember::Join(const GroupIdentity& identity) {
  ISOBIT_LOG(Info) << "shard group: joining " << options_.leader << " as rank " << options_.rank
                   << " of " << options_.world_size;
  channel_ = MakeChannel(options_.leader, kMaxGroupMessageBytes, options_.security);
  ISOBIT_RETURN_IF_ERROR(
      Annotate(WaitForReady(*channel_, options_.leader, options_.timeout), "shard group"));
  stub_ = v1::ShardGroupService::NewStub(channel_);
  if (!options_.secret.empty()) context_.AddMetadata(kGroupSecretHeader, options_.secret);
  stream_ = stub_->Join(&context_);
  v1::MemberMessage message;
  v1::MemberHello& hello = *message.mutable_hello();
  *hello.mutable_identity() =
      MakeGroupIdentity(identity, options_.world_size, options_.local_ranks);
  hello.set_rank(options_.rank);
  Send(message);
  return absl::OkStatus();
}

absl::Status GroupMember::Load(const OpenedModel& model, int64_t max_context,
                               const std::string& nccl_id) {
  const ScorerOptions& scorer = options_.scorer;
  ISOBIT_ASSIGN_OR_RETURN(RankBackend backend, options_.make_backend(nccl_id));
  ISOBIT_ASSIGN_OR_RETURN(
      ranks_,
      ShardRanks::Create(model.config, {.num_shards = options_.world_size * options_.local_ranks,
                                        .first_rank = options_.rank * options_.local_ranks,
                                        .num_ranks = options_.local_ranks,
                                        .max_context = max_context,
                                        .max_batch_tokens = scorer.max_batch_tokens,
                                        .chunk_rows = scorer.chunk_rows,
                                        .prefix_sharing = scorer.prefix_sharing,
                                        .backend = std::move(backend)}));
  ISOBIT_ASSIGN_OR_RETURN(serving_, ranks_->Cut(1, [&](WeightStore& store) {
    return PackModel(*model.weights, "", store, scorer.load_policy.allow_nonfinite);
  }));
  return absl::OkStatus();
}

bool GroupMember::Obey() {
  v1::LeaderMessage order;
  while (stream_->Read(&order)) {
    switch (order.message_case()) {
      case v1::LeaderMessage::kRunPass:
        if (pass_.valid()) pass_.wait();  // short: the leader has its result already
        pass_ =
            std::async(std::launch::async, [this, order = order.run_pass()] { RunPass(order); });
        break;
      case v1::LeaderMessage::kStage:
        if (preparation_.valid()) preparation_.wait();
        preparation_ =
            std::async(std::launch::async, [this, order = order.stage()] { Prepare(order); });
        break;
      case v1::LeaderMessage::kGoodbye:
        return order.goodbye();
      default:
        ISOBIT_LOG(Error) << "shard group: unknown order "
                          << static_cast<int>(order.message_case());
        context_.TryCancel();
        return false;
    }
  }
  return false;
}

void GroupMember::RunPass(const v1::RunPass& order) {
  const absl::Status status = Score(order);
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = status;
  }
  v1::MemberMessage message;
  *message.mutable_pass_done() = MakeOutcome(status);
  Send(message);
}

absl::Status GroupMember::Score(const v1::RunPass& order) {
  const std::shared_ptr<const ShardedVersion> weights = Serving(order.weight_version());
  if (weights->version.id != order.weight_version() || order.ranks_size() != options_.local_ranks) {
    return absl::InternalError(absl::StrCat(
        "shard group: ordered to run version ", order.weight_version(), " on ", order.ranks_size(),
        " ranks, has ", weights->version.id, " on ", options_.local_ranks));
  }
  std::vector<std::vector<ScoreItem>> items(static_cast<size_t>(order.ranks_size()));
  for (int rank = 0; rank < order.ranks_size(); ++rank) {
    for (int i = 0; i < order.ranks(rank).items_size(); ++i) {
      const v1::WorkItem& item = order.ranks(rank).items(i);
      std::vector<ScoreInput> inputs;
      inputs.push_back(InputOf(item));
      items[static_cast<size_t>(rank)].push_back(
          {std::make_shared<ScoreJob>(std::move(inputs), OptionsOf(item),
                                      std::make_shared<Forwarder>(*this, rank, i),
                                      static_cast<size_t>(item.index())),
           0});
    }
  }
  return ranks_->Score(*weights, items);
}

std::shared_ptr<const ShardedVersion> GroupMember::Serving(uint64_t version) {
  const std::lock_guard lock(mutex_);
  if (prepared_ != nullptr && prepared_->version.id == version) {
    serving_ = std::exchange(prepared_, nullptr);
  }
  return serving_;
}

void GroupMember::Prepare(const v1::StageWeights& order) {
  v1::MemberMessage message;
  const auto prepare = [&]() -> absl::Status {
    Serving(order.serving_version());  // there may have been no pass since the switch to it
    {
      const std::lock_guard lock(mutex_);
      prepared_ = nullptr;  // given up; there is no room for three
    }
    const ScorerOptions& scorer = options_.scorer;
    ISOBIT_ASSIGN_OR_RETURN(
        auto weights, ranks_->Cut(order.weight_version(), [&](WeightStore& store) {
          return PrepareWeights(
              {scorer.model_root, scorer.load_format, scorer.load_policy},
              {.model_path = order.model_path(), .expected_digest = order.expected_digest()},
              ranks_->config(), store);
        }));
    message.mutable_staged()->set_digest(weights->version.digest);
    const std::lock_guard lock(mutex_);
    prepared_ = std::move(weights);
    return absl::OkStatus();
  };
  *message.mutable_staged()->mutable_outcome() = MakeOutcome(prepare());
  Send(message);
}

// If the write fails, the call has ended, and the next read reports it.
void GroupMember::Send(const v1::MemberMessage& message) {
  const std::lock_guard lock(write_mutex_);
  if (!writes_ended_) stream_->Write(message);
}

void GroupMember::EndWrites() {
  const std::lock_guard lock(write_mutex_);
  writes_ended_ = true;
  stream_->WritesDone();
}

}  // namespace isobit
