// Counts held bytes without a lock; only opening an account takes one.
#include "common/access/held_bytes.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "proto/isobit/status_convert.h"

namespace isobit {
namespace {

// About the time of one batch. A client that retries too early gets the same hint again.
constexpr std::chrono::milliseconds kRetryDelay(1000);

// Adds `bytes`, unless the sum would then exceed `bound`.
bool AddWithin(std::atomic<size_t>& sum, size_t bytes, size_t bound) {
  const size_t before = sum.fetch_add(bytes);
  if (before <= bound && bytes <= bound - before) return true;
  sum -= bytes;
  return false;
}

}  // namespace

std::string ClientOf(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    const std::vector<grpc::string_ref> names = auth->GetPeerIdentity();
    if (!names.empty()) return std::string(names.front().data(), names.front().size());
  }
  const std::string address = context.peer();  // such as ipv4:10.0.0.7:4711, or unix:/a/socket
  return absl::string_view(address).substr(0, 2) == "ip" ? address.substr(0, address.rfind(':'))
                                                         : address;
}

absl::StatusOr<ByteLimits> ByteLimitsOf(const char* flag, int64_t mib, double client_share) {
  ISOBIT_RETURN_IF_ERROR(RequireInRange(flag, mib, 1, 1 << 20));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("max_client_share", client_share, 0.001, 1.0));
  return ByteLimits{.total = static_cast<size_t>(mib) << 20, .client_share = client_share};
}

ByteBudget::ByteBudget(std::string what, const ByteLimits& limits)
    : what_(std::move(what)),
      max_total_(limits.total),
      max_client_(static_cast<size_t>(static_cast<double>(limits.total) * limits.client_share)) {}

HeldBytes ByteBudget::Open(const std::string& client) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Account>& known = accounts_[client];
  std::shared_ptr<Account> account = known.lock();
  if (account == nullptr) {
    known = account = std::make_shared<Account>(0);
    std::erase_if(accounts_, [](const auto& entry) { return entry.second.expired(); });
  }
  return HeldBytes(shared_from_this(), std::move(account));
}

HeldBytes& HeldBytes::operator=(HeldBytes&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(account_, other.account_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

HeldBytes::~HeldBytes() { Resize(0).IgnoreError(); }

absl::Status HeldBytes::Resize(size_t bytes) {
  if (budget_ == nullptr) return absl::OkStatus();
  if (bytes <= bytes_) {
    budget_->total_ -= bytes_ - bytes;
    *account_ -= bytes_ - bytes;
    bytes_ = bytes;
    return absl::OkStatus();
  }
  const size_t more = bytes - bytes_;
  const bool can_ever_fit = bytes <= std::min(budget_->max_client_, budget_->max_total_);
  const auto refused = [&](absl::string_view whose, size_t bound) {
    const absl::Status status = absl::ResourceExhaustedError(absl::StrCat(
        budget_->what_, ": ", more, " bytes more, expected at most ", bound, " of ", whose));
    return can_ever_fit ? WithRetryAfter(status, kRetryDelay) : status;
  };
  if (!AddWithin(*account_, more, budget_->max_client_)) {
    return refused("one client", budget_->max_client_);
  }
  if (!AddWithin(budget_->total_, more, budget_->max_total_)) {
    *account_ -= more;
    return refused("all clients", budget_->max_total_);
  }
  bytes_ = bytes;
  return absl::OkStatus();
}

}  // namespace isobit
