// The oracle backend with a hook at the start of every forward pass, which can hold a pass up or
// make it fail.
#ifndef ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_HOOKED_OPS_H_
#define ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_HOOKED_OPS_H_

#include <functional>
#include <utility>

#include "kernels/oracle/oracle_backend.h"
#include "tests/support/forwarding_backend.h"

namespace isobit {

class HookedOps final : public testing_support::ForwardingBackend {
 public:
  // `on_embedding` runs before each Embedding; its error is that op's result.
  explicit HookedOps(std::function<absl::Status()> on_embedding)
      : ForwardingBackend(MakeOracleBackend()), on_embedding_(std::move(on_embedding)) {
    Replace<EmbeddingArgs>(*this);
  }

  absl::Status On(const EmbeddingArgs& args) {
    const absl::Status status = on_embedding_();
    return status.ok() ? inner().Run(args) : status;
  }

 private:
  const std::function<absl::Status()> on_embedding_;
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_HOOKED_OPS_H_
