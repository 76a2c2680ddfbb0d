// What the tests of the row-wise CUDA kernels share: operands, random shapes and alignments, and
// the fixture that skips where there is no GPU.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_ROW_CASE_H_
#define ISOBIT_TESTS_KERNELS_CUDA_ROW_CASE_H_

#include <algorithm>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/launch.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::testing_support {

template <typename T>
std::span<const T> View(const std::vector<T>& v) {
  return v;
}

// Slices of values made once: drawing new values for each case would cost more than the kernels.
class Operands {
 public:
  explicit Operands(Random& random) : random_(random) {
    for (const Family family : kFamilies) {
      floats_.push_back(RandomFloats(family, kPool, random));
    }
  }

  // `specials`: a few values are infinities, NaN, subnormals or the largest finite ones.
  std::vector<float> Floats(int64_t n, bool specials) {
    const std::vector<float>& pool = floats_[random_() % floats_.size()];
    std::vector<float> values(static_cast<size_t>(n));
    size_t at = random_() % pool.size();
    for (float& value : values) {
      value = pool[at];
      at = at + 1 == pool.size() ? 0 : at + 1;
    }
    if (specials && n > 0) {
      for (int i = 0; i < 4; ++i) values[random_() % values.size()] = Special();
    }
    return values;
  }
  std::vector<Bf16> Bf16s(int64_t n, bool specials) {
    const std::vector<float> floats = Floats(n, specials);
    std::vector<Bf16> values(floats.size());
    std::transform(floats.begin(), floats.end(), values.begin(),
                   [](float x) { return contract::FloatToBf16(x); });
    return values;
  }

 private:
  static constexpr int64_t kPool = 1 << 20;
  float Special() {
    constexpr uint32_t kSpecials[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u,
                                      0x7f7f0000u, 0x00010000u, 0x80400000u, 0x80000000u};
    return contract::FromBits(kSpecials[random_() % std::size(kSpecials)]);
  }

  Random& random_;
  std::vector<std::vector<float>> floats_;
};

class RowTest : public testing::Test {
 protected:
  void SetUp() override {
    ISOBIT_SKIP_WITHOUT_GPU();
    cpu_ = MakeCpuBackend({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
    ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool Chance(int64_t one_in) { return Below(one_in) == 0; }
  // Bytes past a boundary: mostly 0, otherwise those of a few elements.
  size_t Offset(size_t element) { return Chance(4) ? element * static_cast<size_t>(Below(8)) : 0; }
  // A width of whole vectors, of a model, or any; at most `most`.
  int64_t Width(int64_t most) {
    constexpr int64_t kModels[] = {576,  1024, 2048, 2560,  3072,  3584, 4096,
                                   5120, 7168, 8192, 12288, 14336, 16384};
    const int64_t bound = int64_t{1} << (1 + Below(15));
    switch (Below(4)) {
      case 0:
        return std::min(most, kModels[random_() % std::size(kModels)]);
      case 1:
        return std::min(most, 1 + Below(bound));
      case 2:
        return 1 + Below(most);
      default:
        return std::min(most, 8 * (1 + Below(std::max<int64_t>(1, bound / 8))));
    }
  }
  // Rows of a matrix of about `elements` elements at most.
  int64_t Rows(int64_t width, int64_t elements) {
    const int64_t most = std::max<int64_t>(1, elements / width);
    return 1 + Below(Chance(2) ? std::min<int64_t>(most, 8) : most);
  }
  cuda::Stream AnyStream() { return OnH200(stream_, Chance(2)); }

  Random random_{20};
  Operands operands_{random_};
  std::unique_ptr<Backend> cpu_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_CUDA_ROW_CASE_H_
