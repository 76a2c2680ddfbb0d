// Calls sinks and replies in the engine's order, on a thread of its own, so that sending tokens
// delays no step.
//
// When the emitter is busy, tokens of several steps wait for it. It hands all of them to the sinks
// before it flushes these: the more streams there are, the fewer and larger their messages.
#ifndef ISOBIT_ROLLOUT_ENGINE_EMITTER_H_
#define ISOBIT_ROLLOUT_ENGINE_EMITTER_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "rollout/schedule/request.h"

namespace isobit {

// A token for a sink. The emission of the sink's last call keeps the sink alive.
struct TokenEmission {
  RequestSink* sink;
  uint32_t sample;
  SampledToken token;
};
using Emission = std::variant<TokenEmission, std::function<void()>>;

// At most one thread calls Emit at a time.
class Emitter {
 public:
  ~Emitter() { Stop(); }

  // Starts the thread that makes the calls. Before Start, Emit makes them itself.
  void Start();

  // Waits until all calls have been made, and ends the thread.
  void Stop();

  // Takes all emissions out of the vector.
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

#endif  // ISOBIT_ROLLOUT_ENGINE_EMITTER_H_
