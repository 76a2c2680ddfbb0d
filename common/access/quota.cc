// Counts what calls hold, under one lock.
#include "common/access/quota.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "proto/isobit/status_convert.h"

namespace isobit {
namespace {

// About the time of one batch. A client that retries too early gets the same hint again.
constexpr std::chrono::milliseconds kRetryDelay(1000);

struct Kind {
  int64_t QuotaAmounts::*amount;
  const char* name;
};
constexpr Kind kKinds[] = {{&QuotaAmounts::requests, "requests"},
                           {&QuotaAmounts::streams, "streams"},
                           {&QuotaAmounts::tokens, "tokens"}};

void Add(QuotaAmounts& held, const QuotaAmounts& amounts, int64_t sign) {
  for (const Kind& kind : kKinds) held.*kind.amount += sign * (amounts.*kind.amount);
}

bool IsNothing(const QuotaAmounts& held) {
  return held.requests == 0 && held.streams == 0 && held.tokens == 0;
}

// RESOURCE_EXHAUSTED if `held` plus `amounts` exceeds `limits`. whose: whose limits they are, for
// the message.
absl::Status CheckRoom(absl::string_view whose, const QuotaAmounts& limits,
                       const QuotaAmounts& held, const QuotaAmounts& amounts) {
  for (const auto& [amount, name] : kKinds) {
    const int64_t wanted = amounts.*amount;
    const int64_t limit = limits.*amount;
    if (wanted > limit) {
      return absl::ResourceExhaustedError(absl::StrCat("quota of ", whose, ": the call takes ",
                                                       wanted, " ", name, ", expected at most ",
                                                       limit));
    }
    if (wanted > limit - held.*amount) {
      return WithRetryAfter(absl::ResourceExhaustedError(absl::StrCat(
                                "quota of ", whose, ": ", held.*amount, " of ", limit, " ", name,
                                " are in use, and the call takes ", wanted)),
                            kRetryDelay);
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<Quota> Quota::Create(const QuotaAmounts& each, const QuotaAmounts& all) {
  return std::shared_ptr<Quota>(new Quota(each, all));
}

absl::StatusOr<Quota::Lease> Quota::Take(const std::string& client, const QuotaAmounts& amounts) {
  for (const Kind& kind : kKinds) ISOBIT_CHECK(amounts.*kind.amount >= 0) << kind.name;
  const std::lock_guard lock(mutex_);
  const auto own = held_.find(client);
  const QuotaAmounts held = own == held_.end() ? QuotaAmounts() : own->second;
  ISOBIT_RETURN_IF_ERROR(CheckRoom("this client", each_, held, amounts));
  ISOBIT_RETURN_IF_ERROR(CheckRoom("all clients", all_, total_, amounts));
  Add(held_[client], amounts, 1);
  Add(total_, amounts, 1);
  return Lease(this, [quota = shared_from_this(), client, amounts](const void*) {
    quota->GiveBack(client, amounts);
  });
}

void Quota::GiveBack(const std::string& client, const QuotaAmounts& amounts) {
  const std::lock_guard lock(mutex_);
  Add(total_, amounts, -1);
  const auto own = held_.find(client);
  Add(own->second, amounts, -1);
  if (IsNothing(own->second)) held_.erase(own);
}

size_t Quota::num_clients() const {
  const std::lock_guard lock(mutex_);
  return held_.size();
}

}  // namespace isobit
