// The thread, and the wait that its end interrupts.
#include "common/base/repeating_thread.h"

#include <utility>

namespace isobit {

RepeatingThread::RepeatingThread(std::chrono::milliseconds interval, std::function<void()> run)
    : thread_([state = state_, interval, run = std::move(run)] {
        std::unique_lock lock(state->mutex);
        while (!state->changed.wait_for(lock, interval, [&] { return state->stopping; })) {
          lock.unlock();
          run();
          lock.lock();
        }
      }) {}

RepeatingThread::~RepeatingThread() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

}  // namespace isobit
