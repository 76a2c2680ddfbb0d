// A wall clock that a test can step, as a time server or a resumed machine does. It is that of the
// whole test process: whatever asks the C library.
#ifndef ISOBIT_TESTS_SUPPORT_WALL_CLOCK_H_
#define ISOBIT_TESTS_SUPPORT_WALL_CLOCK_H_

#include <chrono>

namespace isobit::testing_support {

// From now on the wall clock is that far ahead of the system's. The steady clock stays.
void SetWallClockAhead(std::chrono::seconds ahead);

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_WALL_CLOCK_H_
