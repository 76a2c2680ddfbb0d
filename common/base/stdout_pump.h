// Makes standard output such that no writer waits for its reader.
#ifndef ISOBIT_COMMON_BASE_STDOUT_PUMP_H_
#define ISOBIT_COMMON_BASE_STDOUT_PUMP_H_

namespace isobit {

// From now on, what this process or a library in it (NCCL with NCCL_DEBUG, a kernel's printf)
// writes to stdout goes through a LineWriter: its reader may be slow, stopped or gone. Lines that
// wait when the process returns from main or calls exit are still written, within two seconds. Call
// it once, early in main. If no thread or descriptor is available, stdout stays as it is.
void PumpStdout();

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_STDOUT_PUMP_H_
