// A standard output that no writer waits for.
#ifndef ISOBIT_COMMON_BASE_STDOUT_PUMP_H_
#define ISOBIT_COMMON_BASE_STDOUT_PUMP_H_

namespace isobit {

// From now on whatever this process, or a library in it (NCCL with NCCL_DEBUG, a kernel's printf),
// writes to stdout goes through a LineWriter: its reader may be slow, stopped or gone. What is
// there when the process returns from main or calls exit still comes out, within two seconds. Call
// it once, early in main. Without a thread or a descriptor to be had, stdout stays as it is.
void PumpStdout();

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_STDOUT_PUMP_H_
