// SIGINT and SIGTERM ask a run to stop; a second one ends the process at once.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_STOP_SIGNAL_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_STOP_SIGNAL_H_

namespace isobit::trainer {

// For main, before threads start.
void HandleStopSignals();

// Whether a signal has come. Long work checks from time to time, and then ends with CANCELLED.
bool StopAsked();

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_STOP_SIGNAL_H_
