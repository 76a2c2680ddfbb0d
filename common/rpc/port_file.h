// Port files, in which a process tells others the port that the system chose for it.
#ifndef ISOBIT_COMMON_RPC_PORT_FILE_H_
#define ISOBIT_COMMON_RPC_PORT_FILE_H_

#include <string>

#include "absl/status/status.h"

namespace isobit {

// INVALID_ARGUMENT: `path` exists and is not a regular file. A rename would replace a device.
absl::Status CheckPortFile(const std::string& path);

// Writes `port`, in decimal and with a newline. Readers of `path` see no file or the whole number.
// UNKNOWN and others: it cannot be written.
absl::Status WritePortFile(const std::string& path, int port);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_PORT_FILE_H_
