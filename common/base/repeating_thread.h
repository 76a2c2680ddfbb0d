// A thread that calls a function every so often.
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
  // Calls `run` for the first time after `interval`.
  RepeatingThread(std::chrono::milliseconds interval, std::function<void()> run);
  RepeatingThread(const RepeatingThread&) = delete;
  RepeatingThread& operator=(const RepeatingThread&) = delete;
  // Waits for a call of `run` under way. That call itself may destroy this: it is then the last.
  ~RepeatingThread();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool stopping = false;
  };

  // The thread's too, which can outlive this.
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_REPEATING_THREAD_H_
