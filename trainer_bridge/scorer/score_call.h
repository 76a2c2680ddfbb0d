// One Score call: converts scores to messages, and keeps those for which a slow reader has no room.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_CALL_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_CALL_H_

#include <grpcpp/server_context.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/access/held_bytes.h"
#include "common/metrics/metrics.h"
#include "common/rpc/stream_writer.h"
#include "isobit/v1/scorer.pb.h"
#include "trainer_bridge/scorer/score_messages.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit {

class ScoreCall final : public ScoreReceiver {
 public:
  // Opens the stream of `context`. The job ends if the client goes. `scorer` outlives the gRPC
  // server; it may be null if no job is started. memory: what the call may hold. `tokens` counts
  // scored tokens.
  static std::shared_ptr<ScoreCall> Open(grpc::CallbackServerContext* context, Scorer* scorer,
                                         size_t max_queued_bytes, HeldBytes memory,
                                         prometheus::Counter& tokens);

  grpc::ServerWriteReactor<v1::ScoreResponse>* reactor() { return writer_.get(); }

  // Queues the job of `request`; its results and its end go to the stream. `sequence_ids`: one for
  // each sequence. Call it at most once, before the handler returns. Errors: those of
  // Scorer::Submit; RESOURCE_EXHAUSTED: no memory, with a retry hint if a retry can help.
  static absl::Status Start(const std::shared_ptr<ScoreCall>& call, ScoreRequest request,
                            std::vector<std::string> sequence_ids,
                            const v1::Fingerprint& fingerprint);

  void OnScore(SequenceScore score) override;
  void OnDone(const absl::Status& status) override;
  bool CanTakeMore() const override;

 private:
  ScoreCall(Scorer* scorer, size_t max_queued_bytes, HeldBytes memory, prometheus::Counter& tokens)
      : scorer_(scorer),
        max_queued_bytes_(max_queued_bytes),
        memory_(std::move(memory)),
        tokens_(tokens) {}

  // The most tokens whose results can wait for the reader: those in the stream's queue, and those
  // of the batch that fills it.
  int64_t MaxUnreadTokens(uint32_t alternatives) const;

  void OnCancel();
  void OnWritable();
  // Writes held responses while the stream has room. Holds mutex_.
  void Flush();

  Scorer* const scorer_;
  const size_t max_queued_bytes_;
  HeldBytes memory_;
  prometheus::Counter& tokens_;
  std::shared_ptr<StreamWriter<v1::ScoreResponse>> writer_;
  std::weak_ptr<ScoreJob> job_;
  std::vector<std::string> sequence_ids_;
  v1::Fingerprint fingerprint_;

  mutable std::mutex mutex_;            // guards what follows
  std::deque<v1::ScoreResponse> held_;  // at most what one batch yields
  std::optional<absl::Status> final_;   // the job's end
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_SCORE_CALL_H_
