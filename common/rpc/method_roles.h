// Which role each method needs: the one table. docs/API.md shows it to users.
#ifndef ISOBIT_COMMON_RPC_METHOD_ROLES_H_
#define ISOBIT_COMMON_RPC_METHOD_ROLES_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// What a client may be allowed to do. No role holds another.
enum class CallerRole { kGenerate, kScore, kCompare, kWatch, kAdmin };

// "generate", "score", "compare", "watch", "admin".
const char* RoleName(CallerRole role);
std::optional<CallerRole> RoleOfName(absl::string_view name);

// Any number of roles.
class RoleSet {
 public:
  constexpr RoleSet() = default;
  template <class... Roles>
  explicit constexpr RoleSet(Roles... roles) : bits_((Bit(roles) | ... | 0u)) {}

  constexpr void Add(CallerRole role) { bits_ |= Bit(role); }
  constexpr bool Has(CallerRole role) const { return (bits_ & Bit(role)) != 0; }
  constexpr bool HasAnyOf(RoleSet other) const { return (bits_ & other.bits_) != 0; }
  constexpr bool operator==(const RoleSet&) const = default;
  // Their names with " or " between them.
  std::string Names() const;

 private:
  static constexpr unsigned Bit(CallerRole role) { return 1u << static_cast<unsigned>(role); }
  unsigned bits_ = 0;
};

// The roles of which any one allows a call of `method`, such as
// "/isobit.v1.ScorerService/Score"; none for a method that is not in the table.
RoleSet RolesFor(absl::string_view method);

// Whether everybody may call it: health.
bool IsOpenToAll(absl::string_view method);

// Whether it changes what the service is to others: it needs the role admin and no other will do.
// Abort is not, though ending all requests takes that role.
bool IsAdminMethod(absl::string_view method);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_METHOD_ROLES_H_
