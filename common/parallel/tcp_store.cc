// The messages of TCPStore that a client sends and reads.
#include "common/parallel/tcp_store.h"

#include <bit>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/parallel/pickled_nccl_id.h"

namespace isobit {
namespace {

// A query is its kind, then its arguments: numbers as the host has them, and strings with their
// lengths before them.
static_assert(std::endian::native == std::endian::little);
enum class Query : uint8_t { kValidate = 0, kGet = 3, kAdd = 4, kWait = 6 };

constexpr uint32_t kValidation = 0x3C85F7CE;  // what a client says first
constexpr uint8_t kStopWaiting = 0;           // the answer to kWait
constexpr char kWorkers[] = "init/";          // the counter of workers that have come
constexpr char kUserKeys[] = "/";             // before every other key

// Of a pickled id: several times what Python makes of one.
constexpr size_t kMaxPickledId = 4096;

template <typename T>
std::string Number(T value) {
  std::string bytes(sizeof(value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(value));
  return bytes;
}

std::string Text(absl::string_view text) {
  return absl::StrCat(Number<uint64_t>(text.size()), text);
}

std::string Kind(Query query) { return Number(static_cast<uint8_t>(query)); }

}  // namespace

absl::StatusOr<TcpStore> TcpStore::Connect(const std::string& host, int port,
                                           const PeerWait& wait) {
  ISOBIT_ASSIGN_OR_RETURN(TcpConnection connection,
                          TcpConnection::Connect("the trainer's store", host, port, wait));
  ISOBIT_RETURN_IF_ERROR(
      connection.Send(absl::StrCat(Kind(Query::kValidate), Number(kValidation)), wait));
  return TcpStore(std::move(connection), wait);
}

absl::Status TcpStore::CheckIn() {
  ISOBIT_RETURN_IF_ERROR(
      connection_.Send(absl::StrCat(Kind(Query::kAdd), Text(kWorkers), Number<int64_t>(1)), wait_));
  int64_t num_workers = 0;
  ISOBIT_RETURN_IF_ERROR(connection_.Receive(&num_workers, sizeof(num_workers), wait_));
  if (num_workers >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the trainer's store counts ", num_workers, " workers, expected 1 or more"));
}

absl::StatusOr<std::string> TcpStore::Get(absl::string_view key, size_t max_bytes) {
  const std::string whole_key = absl::StrCat(kUserKeys, key);
  ISOBIT_RETURN_IF_ERROR(connection_.Send(
      absl::StrCat(Kind(Query::kWait), Number<uint64_t>(1), Text(whole_key)), wait_));
  uint8_t waited = 0;
  ISOBIT_RETURN_IF_ERROR(connection_.Receive(&waited, sizeof(waited), wait_));
  if (waited != kStopWaiting) {
    return absl::InvalidArgumentError(absl::StrCat("the trainer's store answers a wait with ",
                                                   static_cast<int>(waited), ", expected ",
                                                   static_cast<int>(kStopWaiting)));
  }
  ISOBIT_RETURN_IF_ERROR(connection_.Send(absl::StrCat(Kind(Query::kGet), Text(whole_key)), wait_));
  uint64_t size = 0;
  ISOBIT_RETURN_IF_ERROR(connection_.Receive(&size, sizeof(size), wait_));
  if (size > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the trainer's store has ", size,
                                                   " bytes under \"", key, "\", expected at most ",
                                                   max_bytes));
  }
  std::string value(size, '\0');
  ISOBIT_RETURN_IF_ERROR(connection_.Receive(value.data(), value.size(), wait_));
  return value;
}

absl::StatusOr<std::string> GroupIdInStore(const std::string& host, int port,
                                           const PeerWait& wait) {
  ISOBIT_ASSIGN_OR_RETURN(TcpStore store, TcpStore::Connect(host, port, wait));
  ISOBIT_RETURN_IF_ERROR(store.CheckIn());
  // The first object that rank 0 broadcasts.
  ISOBIT_ASSIGN_OR_RETURN(const std::string pickle, store.Get("broadcast_from/0/0", kMaxPickledId));
  return UnpickleNcclId(pickle);
}

}  // namespace isobit
