// A DevicePacker whose device is the host: what a GPU's packer must do, said with the host's own
// functions.
#ifndef ISOBIT_TESTS_SUPPORT_HOST_PACKER_H_
#define ISOBIT_TESTS_SUPPORT_HOST_PACKER_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/dtype.h"
#include "kernels/contract/portable.h"
#include "kernels/device_packer.h"
#include "kernels/host_device.h"

namespace isobit::testing_support {

class HostPacker : public DevicePacker {
 public:
  absl::StatusOr<Memory> Allocate(size_t bytes) override { return device_.Allocate(bytes); }
  absl::StatusOr<ForeignMemory> MapForeign(const std::string& /*handle*/) override {
    return absl::InvalidArgumentError("a host maps nobody's memory");
  }
  absl::Status Round(const StoredMatrix& from, Bf16* to, int64_t to_stride) override {
    const DType dtype = from.stored_as == StoredAs::kBf16  ? DType::kBf16
                        : from.stored_as == StoredAs::kF16 ? DType::kF16
                                                           : DType::kF32;
    for (int64_t row = 0; row < from.rows; ++row) {
      const auto* const values = static_cast<const std::byte*>(from.values) +
                                 static_cast<size_t>(row * from.stride) * ItemSize(dtype);
      ConvertToBf16(dtype, values, static_cast<size_t>(from.columns), to + row * to_stride);
    }
    return absl::OkStatus();
  }
  absl::Status Pack(const LinearShape& shape, const WeightPacker& layout, const Bf16* w,
                    std::byte* packed) override {
    std::memset(packed, 0, layout.PackedBytes(shape));
    layout.Pack(shape, w, shape.k, packed);
    return absl::OkStatus();
  }
  absl::Status Widen(const Bf16* from, int64_t count, float* to) override {
    std::transform(from, from + count, to, [](Bf16 x) { return contract::Bf16ToFloat(x); });
    return absl::OkStatus();
  }
  absl::Status FillWithZeros(std::byte* to, size_t bytes) override {
    std::memset(to, 0, bytes);
    return absl::OkStatus();
  }
  // docs/API.md, "The weight digest", word by word.
  absl::Status AddSums(const Bf16* values, int64_t rows, int64_t columns, const PartOfTensor& part,
                       uint64_t* sums) override {
    const int64_t row_words = (part.tensor_columns + 3) / 4;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; column += 4) {
        uint64_t word = 0;
        for (int64_t v = 0; v < 4 && column + v < columns; ++v) {
          word |= uint64_t{values[row * columns + column + v]} << (16 * v);
        }
        const auto index = static_cast<uint64_t>((part.first_row + row) * row_words +
                                                 (part.first_column + column) / 4);
        uint64_t mixed = word ^ ((index + 1) * 0x9e3779b97f4a7c15);
        mixed = (mixed ^ (mixed >> 32)) * 0xbf58476d1ce4e5b9;
        mixed ^= mixed >> 32;
        const uint64_t a = mixed * 0x94d049bb133111eb;
        const uint64_t b = mixed * 0xff51afd7ed558ccd;
        sums[0] += a ^ (a >> 32);
        sums[1] += b ^ (b >> 32);
        for (int64_t v = 3; v >= 0; --v) {
          if (((word >> (16 * v)) & 0x7f80) != 0x7f80) continue;
          const auto place = static_cast<uint64_t>((part.first_row + row) * part.tensor_columns +
                                                   part.first_column + column + v);
          sums[2] = std::max(sums[2], ~place);
        }
      }
    }
    return absl::OkStatus();
  }
  absl::Status Copy(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status Finish() override { return absl::OkStatus(); }

 private:
  HostDevice device_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_HOST_PACKER_H_
