// Calls sinks and replies, in the order in which the engine means them, and off its thread: what a
// token costs on the wire delays no step.
//
// A busy emitter finds several steps at once. It hands all their tokens to the sinks before it lets
// these write, so that a stream gets fewer and larger messages the more streams there are.
#ifndef ISOBIT_ROLLOUT_EMITTER_H_
#define ISOBIT_ROLLOUT_EMITTER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "rollout/request.h"

namespace isobit {

// A token for a sink, which outlives the call that comes last: the one that holds it.
struct TokenEmission {
  RequestSink* sink;
  uint32_t sample;
  SampledToken token;
};
using Emission = std::variant<TokenEmission, std::function<void()>>;

// Emit comes from one thread at a time.
class Emitter {
 public:
  ~Emitter() { Stop(); }

  // From now on a thread makes the calls; until then, Emit itself.
  void Start();

  // Returns once all calls have been made; the thread ends.
  void Stop();

  // Takes the emissions and leaves none.
  void Emit(std::vector<Emission>& emissions);

 private:
  using Batches = std::vector<std::vector<Emission>>;

  void Loop();
  static void Deliver(Batches& batches);

  std::thread thread_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  Batches queue_;  // from old to new
  bool stopping_ = false;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_EMITTER_H_
