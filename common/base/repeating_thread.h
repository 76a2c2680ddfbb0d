// A thread that calls a function at a fixed interval.
#ifndef ISOBIT_COMMON_BASE_REPEATING_THREAD_H_
#define ISOBIT_COMMON_BASE_REPEATING_THREAD_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace isobit {

class RepeatingThread {
 public:
  // The first call of `run` comes after `interval`.
  RepeatingThread(std::chrono::milliseconds interval, std::function<void()> run);
  RepeatingThread(const RepeatingThread&) = delete;
  RepeatingThread& operator=(const RepeatingThread&) = delete;
  // Waits for a running call of `run`. That call may destroy this object; it is then the last one.
  ~RepeatingThread();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false;
  };

  // Shared with the thread, which can outlive this object.
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_REPEATING_THREAD_H_
