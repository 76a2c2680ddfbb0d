// The flags that every service binary has: --host, --port, --port_file, --max_connections,
// --drain_timeout_ms.
#ifndef ISOBIT_COMMON_RPC_SERVER_FLAGS_H_
#define ISOBIT_COMMON_RPC_SERVER_FLAGS_H_

#include "common/rpc/server_runner.h"

namespace isobit {

// The options that the parsed flags ask for.
ServerOptions ServerOptionsFromFlags();

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVER_FLAGS_H_
