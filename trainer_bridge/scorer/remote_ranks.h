// The shard ranks of other processes, as the leader's engine sees them. GroupLeader implements it.
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
  bool prefix_sharing = true;  // decides what a rank computes, and so the memory of a pass
};

// The ranks local .. world_size * local - 1, where each process has `local` ranks. Errors are
// final, except where a method says otherwise.
class RemoteRanks {
 public:
  virtual ~RemoteRanks() = default;

  // Waits until all have loaded the first weights.
  virtual absl::Status WaitUntilReady() = 0;

  // Has all load other weights beside version `serving`, and waits for that; passes of that version
  // go on meanwhile. Weights that were prepared before and are of neither version are not needed
  // any more. An error leaves the old weights serving. `expected_digest`: empty, or what they must
  // have.
  virtual absl::Status Prepare(const std::string& model_path, uint64_t version,
                               const std::string& expected_digest, uint64_t serving) = 0;

  // Whether what each has loaded, or prepared, last has this digest. FAILED_PRECONDITION, naming
  // who has read other weights; not final.
  virtual absl::Status CheckDigest(const std::string& digest) = 0;

  // One pass, as ShardRanks::Score: items[i] are those of the i-th of these ranks. Weights that
  // were prepared before and are older than `version` are not needed any more.
  virtual absl::Status Score(const WeightVersion& version,
                             absl::Span<const std::vector<ScoreItem>> items) = 0;

  // Ends the group: calls that wait and later calls fail with `reason`, an error. Any thread.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_REMOTE_RANKS_H_
