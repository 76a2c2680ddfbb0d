// Converts between the messages of a shard group and the scorer's types.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_MESSAGES_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_MESSAGES_H_

#include "absl/status/status.h"
#include "isobit/v1/shard_group.pb.h"
#include "trainer_bridge/scorer/remote_ranks.h"
#include "trainer_bridge/scorer/score_job.h"

namespace isobit {

// Messages between the processes have no size limit. Clients' requests bound their content, but it
// can exceed gRPC's default limit: a pass has sequences of many requests, and a result that just
// fits into the client's message may be longer here.
inline constexpr int kMaxGroupMessageBytes = -1;

// The header in which a member shows the group secret.
inline constexpr char kGroupSecretHeader[] = "isobit-group-token";

v1::GroupIdentity MakeGroupIdentity(const GroupIdentity& identity, int world_size, int local_ranks);
// FAILED_PRECONDITION naming the first field that differs.
absl::Status CheckSameGroup(const v1::GroupIdentity& expected, const v1::GroupIdentity& actual);

v1::Outcome MakeOutcome(const absl::Status& status);
absl::Status StatusOf(const v1::Outcome& outcome);

v1::WorkItem MakeWorkItem(const ScoreItem& item);
ScoreInput InputOf(const v1::WorkItem& item);
ScoreOptions OptionsOf(const v1::WorkItem& item);

// The message of a score; the caller sets the fields that say to which sequence it belongs.
v1::SequenceScored MakeScored(const SequenceScore& score);
// The score in a message, without index and version.
SequenceScore ScoreOf(const v1::SequenceScored& scored);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_MESSAGES_H_
