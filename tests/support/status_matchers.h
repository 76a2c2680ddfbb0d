// GoogleTest matchers for absl::Status and absl::StatusOr, which this Abseil release lacks.
#ifndef ISOBIT_TESTS_SUPPORT_STATUS_MATCHERS_H_
#define ISOBIT_TESTS_SUPPORT_STATUS_MATCHERS_H_

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit::testing_support {

inline const absl::Status& StatusOf(const absl::Status& status) { return status; }

template <class T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// EXPECT_THAT(status_or_statusor, IsOk());
MATCHER(IsOk, negation ? "is not OK" : "is OK") {
  *result_listener << "whose status is " << StatusOf(arg).ToString();
  return StatusOf(arg).ok();
}

// EXPECT_THAT(result, StatusIs(absl::StatusCode::kNotFound));
MATCHER_P(StatusIs, code, "has code " + absl::StatusCodeToString(code)) {
  *result_listener << "whose status is " << StatusOf(arg).ToString();
  return StatusOf(arg).code() == code;
}

// EXPECT_THAT(result, StatusIs(absl::StatusCode::kNotFound, testing::HasSubstr("lm_head")));
MATCHER_P2(StatusIs, code, message_matcher, "has code " + absl::StatusCodeToString(code)) {
  const absl::Status& status = StatusOf(arg);
  const std::string message(status.message());  // absl::string_view is not std::string_view here
  *result_listener << "whose status is " << status.ToString();
  return status.code() == code &&
         testing::ExplainMatchResult(message_matcher, message, result_listener);
}

}  // namespace isobit::testing_support

#define ISOBIT_ASSERT_OK(expr) ASSERT_THAT(expr, ::isobit::testing_support::IsOk())
#define ISOBIT_EXPECT_OK(expr) EXPECT_THAT(expr, ::isobit::testing_support::IsOk())

// ISOBIT_ASSERT_OK_AND_ASSIGN(auto x, F()): fails the test unless F() is OK, else moves its value
// into `lhs`.
#define ISOBIT_ASSERT_OK_AND_ASSIGN(lhs, expr) \
  ISOBIT_ASSERT_OK_AND_ASSIGN_IMPL_(ISOBIT_TEST_CONCAT_(isobit_result_, __LINE__), lhs, expr)
// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define ISOBIT_ASSERT_OK_AND_ASSIGN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                      \
  ISOBIT_ASSERT_OK(result);                                  \
  lhs = std::move(result).value()
// NOLINTEND(bugprone-macro-parentheses)
#define ISOBIT_TEST_CONCAT_(a, b) ISOBIT_TEST_CONCAT_INNER_(a, b)
#define ISOBIT_TEST_CONCAT_INNER_(a, b) a##b

#endif  // ISOBIT_TESTS_SUPPORT_STATUS_MATCHERS_H_
