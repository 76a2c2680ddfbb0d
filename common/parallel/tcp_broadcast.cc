// Reads the group's id, greets rank 0, and reads what it sends.
#include "common/parallel/tcp_broadcast.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/base/status_macros.h"
#include "common/parallel/pickled_nccl_id.h"

namespace isobit {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kPrefix[] = "isobit-tcp ";
constexpr uint8_t kAllAreHere = 1;

struct Address {
  std::string host;
  int port = 0;
};

absl::StatusOr<Address> AddressIn(absl::string_view id) {
  if (id.size() != kNcclIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a group's id of ", id.size(), " bytes, expected ", kNcclIdBytes));
  }
  if (!absl::ConsumePrefix(&id, kPrefix)) {
    return absl::FailedPreconditionError(
        "the group's id is NCCL's, and a service on CPUs has no NCCL: it joins groups of TCP "
        "connections alone (docs/API.md, \"Weights by broadcast\")");
  }
  const absl::string_view text = id.substr(0, id.find('\0'));
  const size_t colon = text.rfind(':');
  Address address;
  const bool is_address = colon != absl::string_view::npos && colon > 0 &&
                          absl::SimpleAtoi(text.substr(colon + 1), &address.port) &&
                          address.port > 0 && address.port <= 65535;
  if (!is_address || id.find_first_not_of('\0', text.size()) != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("the group's id: expected \"", kPrefix, "HOST:PORT\" and zeros"));
  }
  address.host.assign(text.data(), colon);
  return address;
}

class TcpBroadcast final : public WeightBroadcast {
 public:
  explicit TcpBroadcast(TcpConnection connection) : connection_(std::move(connection)) {}

  // What comes is read where it is wanted.
  absl::Status Reserve(size_t /*bytes*/) override { return absl::OkStatus(); }

  absl::Status Begin(size_t bytes, std::chrono::milliseconds max_silence,
                     const std::function<absl::Status()>& check) override {
    max_silence_ = max_silence;
    check_ = check;
    uint64_t sent = 0;
    ISOBIT_RETURN_IF_ERROR(Read(&sent, sizeof(sent)));
    if (sent == bytes) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("the trainer broadcasts ", sent, " bytes, expected ", bytes));
  }

  absl::Status Read(void* out, size_t bytes) override {
    return connection_.Receive(
        out, bytes, {.deadline = std::chrono::steady_clock::now() + max_silence_, .check = check_});
  }

 private:
  TcpConnection connection_;
  std::chrono::milliseconds max_silence_{0};
  std::function<absl::Status()> check_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WeightBroadcast>> JoinTcpBroadcast(const BroadcastGroup& group,
                                                                  const PeerWait& wait) {
  ISOBIT_ASSIGN_OR_RETURN(const Address address, AddressIn(group.id));
  ISOBIT_ASSIGN_OR_RETURN(
      TcpConnection connection,
      TcpConnection::Connect("the trainer's group", address.host, address.port, wait));
  std::string hello = group.id;
  for (const int number : {group.rank, group.size}) {
    const auto value = static_cast<uint32_t>(number);
    hello.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  ISOBIT_RETURN_IF_ERROR(connection.Send(hello, wait));
  uint8_t answer = 0;
  ISOBIT_RETURN_IF_ERROR(connection.Receive(&answer, sizeof(answer), wait));
  if (answer != kAllAreHere) {
    return absl::InvalidArgumentError(absl::StrCat("the trainer's group answers ",
                                                   static_cast<int>(answer), ", expected ",
                                                   static_cast<int>(kAllAreHere)));
  }
  return std::make_unique<TcpBroadcast>(std::move(connection));
}

}  // namespace isobit
