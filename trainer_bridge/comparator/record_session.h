// One Record call: compares the pairs that the caller streams, and returns the summary.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORD_SESSION_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORD_SESSION_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/access/call_gate.h"
#include "common/access/held_bytes.h"
#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/report.h"

namespace isobit {

// Deletes itself when gRPC has released it. The first sequence that cannot be compared ends the
// call with its error; sequences before it stay in the history.
class RecordSession final : public grpc::ServerReadReactor<v1::RecordRequest> {
 public:
  // `context` and `summary`, the response, belong to the call. `gate` outlives it. memory: what the
  // call may hold.
  RecordSession(grpc::CallbackServerContext& context, CallGate& gate,
                std::shared_ptr<History> history, v1::CompareSummary* summary, HeldBytes memory);

 private:
  void OnReadDone(bool ok) override;
  void OnDone() override { delete this; }

  absl::Status Compare();

  grpc::CallbackServerContext& context_;
  CallGate& gate_;
  const std::shared_ptr<History> history_;
  const History::Comparison comparison_;
  v1::CompareSummary* const summary_;
  HeldBytes memory_;
  v1::RecordRequest request_;
  uint64_t num_records_ = 0;
  SummaryBuilder builder_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORD_SESSION_H_
