// Division and rounding up of counts and sizes, on the host.
#ifndef ISOBIT_COMMON_BASE_ROUND_UP_H_
#define ISOBIT_COMMON_BASE_ROUND_UP_H_

#include <concepts>
#include <type_traits>

namespace isobit {

// The smallest integer >= a / b. a >= 0, b > 0.
template <std::integral T>
constexpr T CeilDiv(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

// The smallest multiple of `unit` that is >= a. a >= 0, unit > 0.
template <std::integral T>
constexpr T RoundUp(T a, std::type_identity_t<T> unit) {
  return CeilDiv(a, unit) * unit;
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_ROUND_UP_H_
