// Early returns for absl::Status and absl::StatusOr.
#ifndef ISOBIT_COMMON_BASE_STATUS_MACROS_H_
#define ISOBIT_COMMON_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the status of `expr` from the enclosing function unless it is OK.
#define ISOBIT_RETURN_IF_ERROR(expr)                                                       \
  do {                                                                                     \
    if (absl::Status isobit_status_ = (expr); !isobit_status_.ok()) return isobit_status_; \
  } while (false)

// ISOBIT_ASSIGN_OR_RETURN(auto x, F()): moves the value of a StatusOr into `lhs`, or returns its
// status. Expands to several statements, so it needs braces under an if; a `lhs` or `expr` with a
// bare comma needs parentheses.
#define ISOBIT_ASSIGN_OR_RETURN(lhs, expr) \
  ISOBIT_ASSIGN_OR_RETURN_IMPL_(ISOBIT_CONCAT_(isobit_statusor_, __LINE__), lhs, expr)

// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define ISOBIT_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                  \
  if (!result.ok()) return std::move(result).status();   \
  lhs = std::move(result).value()
// NOLINTEND(bugprone-macro-parentheses)

#define ISOBIT_CONCAT_(a, b) ISOBIT_CONCAT_INNER_(a, b)
#define ISOBIT_CONCAT_INNER_(a, b) a##b

#endif  // ISOBIT_COMMON_BASE_STATUS_MACROS_H_
