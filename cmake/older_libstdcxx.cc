// What the operators would take from a libstdc++ newer than GCC 11's, the oldest that the wheels
// run with. The linker puts it in the place of the library's own (--wrap):
// trainer_bridge/torch/CMakeLists.txt.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

// condition_variable::wait(unique_lock<mutex>&), which has a second form since GCC 12: this is what
// both do.
extern "C" void
WaitOfAnyLibstdcxx(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) asm(
    "__wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");

void WaitOfAnyLibstdcxx(std::condition_variable* condition, std::unique_lock<std::mutex>* lock) {
  pthread_cond_wait(condition->native_handle(), lock->mutex()->native_handle());
}
