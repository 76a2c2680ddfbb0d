// The roles that each method needs: the only table of them. docs/API.md shows it to users.
#ifndef ISOBIT_COMMON_ACCESS_METHOD_ROLES_H_
#define ISOBIT_COMMON_ACCESS_METHOD_ROLES_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// What a client may be allowed to do. No role includes another.
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
  // The names, with " or " between them.
  std::string Names() const;

 private:
  static constexpr unsigned Bit(CallerRole role) { return 1u << static_cast<unsigned>(role); }
  unsigned bits_ = 0;
};

// The roles of which a caller of `method`, such as "/isobit.v1.ScorerService/Score", needs any one.
// Empty if the method is not in the table.
RoleSet RolesFor(absl::string_view method);

// Whether every caller may use it. True for health alone.
bool IsOpenToAll(absl::string_view method);

// Whether it needs the role admin because it changes the service for others. False for Abort,
// although ending all requests needs that role.
bool IsAdminMethod(absl::string_view method);

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_METHOD_ROLES_H_
