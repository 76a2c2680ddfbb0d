// A queue of batches and its thread. See emitter.h.
#include "rollout/engine/emitter.h"

#include <utility>

namespace isobit {

void Emitter::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void Emitter::Stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

void Emitter::Emit(std::vector<Emission>& emissions) {
  if (emissions.empty()) return;
  const size_t size = emissions.size();
  Batches batches;
  batches.push_back(std::exchange(emissions, {}));
  emissions.reserve(size);
  if (!thread_.joinable()) return Deliver(batches);
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(batches.front()));
  if (queue_.size() == 1) changed_.notify_one();
}

void Emitter::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Batches batches = std::exchange(queue_, {});
    lock.unlock();
    Deliver(batches);
    batches.clear();  // sinks may end here
    lock.lock();
  }
}

void Emitter::Deliver(Batches& batches) {
  for (std::vector<Emission>& batch : batches) {
    for (Emission& emission : batch) {
      if (auto* token = std::get_if<TokenEmission>(&emission)) {
        token->sink->OnToken(token->sample, std::move(token->token));
      } else {
        std::get<std::function<void()>>(emission)();
      }
    }
  }
  for (const std::vector<Emission>& batch : batches) {
    for (const Emission& emission : batch) {
      if (const auto* token = std::get_if<TokenEmission>(&emission)) token->sink->Flush();
    }
  }
}

}  // namespace isobit
