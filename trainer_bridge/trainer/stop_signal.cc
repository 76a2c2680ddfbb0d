// The signal handler.
#include "trainer_bridge/trainer/stop_signal.h"

#include <unistd.h>

#include <atomic>
#include <csignal>

namespace isobit::trainer {
namespace {

std::atomic<bool> g_asked{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may take no lock");

void Ask(int number) {
  if (g_asked.exchange(true)) _exit(128 + number);
}

}  // namespace

void HandleStopSignals() {
  struct sigaction action = {};
  action.sa_handler = &Ask;
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGINT, SIGTERM}) sigaction(number, &action, nullptr);
}

bool StopAsked() { return g_asked; }

}  // namespace isobit::trainer
