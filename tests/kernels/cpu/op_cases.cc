// Random operands, and the list of backends under test.
#include "tests/kernels/cpu/op_cases.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/contract/portable.h"

namespace isobit::testing_support {

std::vector<CpuOptions> AllCpuOptions() {
  std::vector<CpuOptions> all;
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (isa > cpu::DetectIsa()) continue;
    for (const int threads : {1, 2, 3}) all.push_back({isa, threads});
  }
  return all;
}

std::string Describe(const CpuOptions& options) {
  return absl::StrCat(std::string(cpu::IsaName(options.isa)), ", ", options.num_threads,
                      " threads");
}

float RandomValue(Family family, Random& random) {
  const float normal = std::normal_distribution<float>()(random);
  const auto below = [&random](int n) {
    return static_cast<int>(random() % static_cast<uint64_t>(n));
  };
  switch (family) {
    case Family::kNormal:
      return normal;
    case Family::kWide:
      return std::ldexp(normal, below(45) - 22);
    case Family::kZeros:
      return below(5) < 2 ? std::copysign(0.0f, normal) : normal;
    case Family::kIntegers:
      return static_cast<float>(below(5) - 2);
  }
  return normal;
}

std::vector<Bf16> RandomBf16(Family family, int64_t n, Random& random) {
  std::vector<Bf16> values(static_cast<size_t>(n));
  for (Bf16& value : values) value = contract::FloatToBf16(RandomValue(family, random));
  return values;
}

std::vector<float> RandomFloats(Family family, int64_t n, Random& random) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = RandomValue(family, random);
  return values;
}

void CancelLeaves(const LinearShape& shape, int64_t rows, std::vector<Bf16>* x,
                  std::vector<Bf16>* w) {
  const int64_t leaf = shape.k / contract::kLeaves;
  const auto copy = [&](std::vector<Bf16>* matrix, int64_t count, Bf16 sign) {
    for (int64_t r = 0; r < count; ++r) {
      Bf16* row = matrix->data() + r * shape.k;
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t c = 0; c < leaf; ++c) {
          row[(4 + i) * leaf + c] = static_cast<Bf16>(row[(i + 1) % 4 * leaf + c] ^ sign);
        }
      }
    }
  };
  copy(x, rows, 0);
  copy(w, shape.n, 0x8000);
}

PackedWeight::PackedWeight(const Backend& ops, const LinearShape& shape, const Bf16* w, int64_t ldw)
    : lines_(ops.packer().PackedBytes(shape) / sizeof(Line) + 1) {
  weight_.shape = shape;
  weight_.packed = lines_.front().bytes;
  ops.packer().Pack(shape, w, ldw, lines_.front().bytes);
}

}  // namespace isobit::testing_support
