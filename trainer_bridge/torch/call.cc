#include "trainer_bridge/torch/call.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace isobit::bridge {
namespace {

using torch::headeronly::ScalarType;

std::string NameOf(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return absl::StrCat("dtype ", static_cast<int>(dtype));
  }
}

Shape ShapeOf(const Tensor& t) {
  const auto sizes = t.sizes();
  return {sizes.begin(), sizes.end()};
}

std::string DeviceOf(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  if (t.is_cuda()) return absl::StrCat("cuda:", t.get_device_index());
  return "another device";
}

std::string Describe(ScalarType dtype, const Shape& shape, const std::string& device,
                     bool contiguous) {
  return absl::StrCat(contiguous ? "" : "not contiguous ", NameOf(dtype), " [",
                      absl::StrJoin(shape, ", "), "] on ", device);
}

}  // namespace

std::pair<int64_t, int64_t> Call::MatrixShape(const char* name, const Tensor& t) const {
  Require(t.dim() == 2, name, "2 dimensions", absl::StrCat(t.dim()));
  return {t.size(0), t.size(1)};
}

int64_t Call::Length(const char* name, const Tensor& t) const {
  Require(t.dim() == 1, name, "1 dimension", absl::StrCat(t.dim()));
  return t.size(0);
}

void Call::Check(const char* name, const Tensor& t, ScalarType dtype, const Shape& shape) const {
  const std::string expected = DeviceOf(first_);
  const std::string device = DeviceOf(t);
  const bool fits =
      t.scalar_type() == dtype && ShapeOf(t) == shape && device == expected && t.is_contiguous();
  if (fits) return;
  Require(false, name, Describe(dtype, shape, expected, true),
          Describe(t.scalar_type(), ShapeOf(t), device, t.is_contiguous()));
}

void Call::CheckRange(const char* name, const Tensor& t, int64_t bound) const {
  if (!t.is_cpu()) return;
  const auto* values = static_cast<const int32_t*>(t.const_data_ptr());
  for (int64_t i = 0; i < t.numel(); ++i) {
    if (values[i] >= 0 && values[i] < bound) continue;
    Require(false, name, absl::StrCat("values from 0 to ", bound - 1),
            absl::StrCat(values[i], " at ", i));
  }
}

void Call::CheckBounds(const char* name, const Tensor& t, int64_t rows) const {
  if (!t.is_cpu()) return;
  const auto* values = static_cast<const int32_t*>(t.const_data_ptr());
  const absl::Span<const int32_t> bounds(values, static_cast<size_t>(t.numel()));
  if (bounds.front() == 0 && bounds.back() == rows && std::ranges::is_sorted(bounds)) return;
  Require(false, name, absl::StrCat("ascending values from 0 to ", rows),
          absl::StrCat("[", absl::StrJoin(bounds, ", "), "]"));
}

PackBounds Call::Packs(const Bounds& bounds, int64_t rows) const {
  const size_t count = bounds.empty() ? 0 : bounds.size() - 1;
  const bool holds = count > 0 && count <= 64 && std::has_single_bit(count) &&
                     bounds.front() == 0 && bounds.back() == rows &&
                     std::is_sorted(bounds.begin(), bounds.end());
  if (!holds) {
    Require(false, "packs",
            absl::StrCat("ascending bounds of 1, 2, 4, .. 64 packs, from 0 to ", rows),
            absl::StrCat("[", absl::StrJoin(bounds, ", "), "]"));
  }
  return bounds;
}

Tensor Call::Empty(ScalarType dtype, const Shape& shape) const {
  return torch::stable::new_empty(first_, shape, dtype);
}

Tensor Call::Zeroed(Tensor t) { return torch::stable::zero_(t); }

void Call::Require(bool holds, const char* name, const std::string& expected,
                   const std::string& got) const {
  if (holds) return;
  throw std::runtime_error(
      absl::StrCat("isobit::", op_, ": ", name, ": expected ", expected, ", got ", got));
}

void Call::Finish(const absl::Status& status) const {
  if (status.ok()) return;
  throw std::runtime_error(absl::StrCat("isobit::", op_, ": ", status.message()));
}

}  // namespace isobit::bridge
