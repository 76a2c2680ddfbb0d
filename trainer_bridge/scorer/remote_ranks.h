// The shard ranks of other processes, as the leader's engine uses them. GroupLeader implements it.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_REMOTE_RANKS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_REMOTE_RANKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/checkpoint/opened_model.h"
#include "trainer_bridge/scorer/scoring_rank.h"

namespace isobit {

// What must be the same in all processes of a group before they load weights.
struct GroupIdentity {
  std::string fingerprint;  // of config and numerics
  std::string settings;     // ModelConfig::Settings
  int64_t max_context = 0;
  bool prefix_sharing = true;  // decides what a rank computes, hence the memory
};

// The ranks local .. world_size * local - 1, if each process has `local` ranks. Errors are final,
// unless a method says otherwise.
class RemoteRanks {
 public:
  virtual ~RemoteRanks() = default;

  // Waits until all have loaded the first weights.
  virtual absl::Status WaitUntilReady() = 0;

  // Makes all of them load other weights beside version `serving`, and waits for that; passes of
  // that version go on meanwhile. Earlier prepared weights of neither version may be freed.
  // After an error the old weights still serve. `expected_digest`: that of the new weights, or
  // empty.
  virtual absl::Status Prepare(const std::string& model_path, uint64_t version,
                               const std::string& expected_digest, uint64_t serving) = 0;

  // FAILED_PRECONDITION, naming the process: the weights that it loaded or prepared last have
  // another digest. This error is not final.
  virtual absl::Status CheckDigest(const std::string& digest) = 0;

  // One pass, as ShardRanks::Score: items[i] are those of the i-th of these ranks. Prepared weights
  // older than `version` may be freed.
  virtual absl::Status Score(const WeightVersion& version,
                             absl::Span<const std::vector<ScoreItem>> items) = 0;

  // Ends the group: waiting and later calls fail with `reason`, an error. Any thread may call it.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_REMOTE_RANKS_H_
