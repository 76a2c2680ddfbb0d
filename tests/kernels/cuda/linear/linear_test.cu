// The linear layer on a GPU against the CPU backend, bit for bit: every schedule, output, leaf plan
// and alignment, on random shapes.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/linear.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using contract::LeafSum;
using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::kFamilies;
using testing_support::OnH200;
using testing_support::PackedWeight;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::RandomFloats;
using testing_support::Scaled;

enum class Output { kBf16, kFp32, kSwiGlu };

struct Problem {
  LinearShape shape;
  int64_t m = 0;
  int64_t ldx = 0;
  int64_t ldy = 0;
  Output output = Output::kBf16;
  size_t x_offset = 0;  // bytes past an aligned address
  size_t y_offset = 0;
  std::vector<Bf16> x = {};  // [m, ldx] less the last row's gap; gaps are NaN
  std::vector<Bf16> w = {};  // [n, k]
  std::vector<float> bias = {};

  int64_t columns() const { return output == Output::kSwiGlu ? shape.n / 2 : shape.n; }
  bool mappable() const { return x_offset % 16 == 0 && ldx % 8 == 0; }
};

std::string Describe(const Problem& p) {
  std::string bounds;
  for (int l = 0; l <= p.shape.num_leaves; ++l) absl::StrAppend(&bounds, " ", p.shape.bounds[l]);
  return absl::StrFormat("m %d, n %d%s, leaves%s, %s, output %d%s, ldx %d, ldy %d, offsets %d %d",
                         p.m, p.shape.n, p.shape.gated ? " gated" : "", bounds,
                         p.shape.sum == LeafSum::kTree ? "tree" : "chain",
                         static_cast<int>(p.output), p.bias.empty() ? "" : " + bias", p.ldx, p.ldy,
                         p.x_offset, p.y_offset);
}

LinearShape ShapeOf(int64_t n, const contract::LeafPlan& plan, int rank, int size, LeafSum sum) {
  const contract::LeafRange leaves = contract::LeavesOfRank(rank, size);
  LinearShape shape{.n = n, .num_leaves = leaves.end - leaves.begin, .sum = sum};
  const int64_t first = plan.bounds[static_cast<size_t>(leaves.begin)];
  for (int l = 0; l <= shape.num_leaves; ++l) {
    shape.bounds[l] = plan.bounds[static_cast<size_t>(leaves.begin + l)] - first;
  }
  shape.k = shape.bounds[shape.num_leaves];
  return shape;
}

void Fill(Problem& p, Family family, bool bias, Random& random) {
  p.x = RandomBf16(family, (p.m - 1) * p.ldx + p.shape.k, random);
  for (int64_t i = 0; i < static_cast<int64_t>(p.x.size()); ++i) {
    if (i % p.ldx >= p.shape.k) p.x[static_cast<size_t>(i)] = 0x7fc0;
  }
  p.w = RandomBf16(family, p.shape.n * p.shape.k, random);
  if (bias) p.bias = RandomFloats(family, p.shape.n, random);
}

// y as bits, [m, columns].
using Bits = std::vector<uint32_t>;

Backend& Cpu() {
  static const std::unique_ptr<Backend> ops =
      MakeCpuBackend({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
  return *ops;
}

void SetOutput(LinearArgs& args, Output output, void* y) {
  switch (output) {
    case Output::kBf16:
      args.bf16_out = static_cast<Bf16*>(y);
      return;
    case Output::kFp32:
      args.fp32_out = static_cast<float*>(y);
      return;
    case Output::kSwiGlu:
      args.swiglu_out = static_cast<Bf16*>(y);
      return;
  }
}

Bits CpuBits(const Problem& p) {
  const PackedWeight packed(Cpu(), p.shape, p.w.data(), p.shape.k);
  const auto count = static_cast<size_t>(p.m * p.columns());
  std::vector<float> fp32(count);
  std::vector<Bf16> bf16(count);
  LinearArgs args{.x = p.x.data(),
                  .ldx = p.ldx,
                  .m = p.m,
                  .weight = packed.weight(),
                  .bias = p.bias.empty() ? nullptr : p.bias.data(),
                  .ldy = p.columns()};
  SetOutput(args, p.output,
            p.output == Output::kFp32 ? static_cast<void*>(fp32.data()) : bf16.data());
  EXPECT_TRUE(Cpu().Run(args).ok());
  Bits bits(count);
  for (size_t i = 0; i < count; ++i) {
    bits[i] = p.output == Output::kFp32 ? std::bit_cast<uint32_t>(fp32[i]) : bf16[i];
  }
  return bits;
}

// A problem's operands and output on the device. All that no result may depend on is poison.
class OnDevice {
 public:
  explicit OnDevice(const Problem& p) : problem_(p), x_(p.x, p.x_offset) {
    std::vector<std::byte> packed(PackedLinearBytes(p.shape));
    PackLinear(p.shape, p.w.data(), p.shape.k, packed.data());
    packed_ = std::make_unique<DeviceBuffer<std::byte>>(packed);
    if (!p.bias.empty()) bias_ = std::make_unique<DeviceBuffer<float>>(p.bias, sizeof(float));
    if (p.output == Output::kFp32) {
      fp32_ = std::make_unique<DeviceBuffer<float>>(p.m * p.ldy, p.y_offset);
    } else {
      bf16_ = std::make_unique<DeviceBuffer<Bf16>>(p.m * p.ldy, p.y_offset);
    }
  }

  LinearArgs Args() {
    LinearArgs args{.x = x_.data(),
                    .ldx = problem_.ldx,
                    .m = problem_.m,
                    .weight = {.shape = problem_.shape, .packed = packed_->data()},
                    .bias = bias_ == nullptr ? nullptr : bias_->data(),
                    .ldy = problem_.ldy};
    SetOutput(args, problem_.output,
              fp32_ != nullptr ? static_cast<void*>(fp32_->data()) : bf16_->data());
    return args;
  }

  void Poison() { fp32_ != nullptr ? fp32_->Poison() : bf16_->Poison(); }

  // Waits for the device. Fails the test if anything but y was written.
  Bits Read() {
    if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
      ADD_FAILURE() << cudaGetErrorString(error);
      std::abort();  // the device is lost
    }
    return fp32_ != nullptr ? ReadFrom(*fp32_) : ReadFrom(*bf16_);
  }

 private:
  template <typename T>
  Bits ReadFrom(DeviceBuffer<T>& y) {
    EXPECT_TRUE(y.GuardsIntact());
    const std::vector<T> values = y.CopyOut();
    const uint32_t poison = sizeof(T) == 4 ? 0xffffffffu : 0xffffu;
    Bits bits;
    int64_t overwritten = 0;
    for (int64_t i = 0; i < problem_.m * problem_.ldy; ++i) {
      const T value = values[static_cast<size_t>(i)];
      uint32_t pattern = 0;
      if constexpr (sizeof(T) == 4) {
        pattern = std::bit_cast<uint32_t>(value);
      } else {
        pattern = value;
      }
      if (i % problem_.ldy < problem_.columns()) {
        bits.push_back(pattern);
      } else {
        overwritten += pattern != poison;
      }
    }
    EXPECT_EQ(overwritten, 0) << "between the rows of y";
    return bits;
  }

  const Problem& problem_;
  DeviceBuffer<Bf16> x_;
  std::unique_ptr<DeviceBuffer<std::byte>> packed_;
  std::unique_ptr<DeviceBuffer<float>> bias_;
  std::unique_ptr<DeviceBuffer<float>> fp32_;
  std::unique_ptr<DeviceBuffer<Bf16>> bf16_;
};

testing::AssertionResult SameBits(const Bits& actual, const Bits& expected, int64_t columns) {
  if (actual.size() != expected.size()) return testing::AssertionFailure() << "sizes differ";
  int64_t unequal = 0;
  size_t first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] != expected[i] && unequal++ == 0) first = i;
  }
  if (unequal == 0) return testing::AssertionSuccess();
  const auto at = static_cast<int64_t>(first);
  return testing::AssertionFailure() << absl::StrFormat(
             "%d of %d differ; first at [%d, %d]: 0x%x, expected 0x%x", unequal, actual.size(),
             at / columns, at % columns, actual[first], expected[first]);
}

// Whether ISOBIT_TEST_WITHOUT_CLUSTERS asks for schedules without clusters only
// (tests/run_sanitizers.sh).
bool WithoutClusters() { return std::getenv("ISOBIT_TEST_WITHOUT_CLUSTERS") != nullptr; }

// Whether a schedule is among those that compute the layer here.
bool Usable(const LinearSchedule& schedule, const LinearShape& shape, bool mappable) {
  using Kind = LinearSchedule::Kind;
  const bool clusters =
      (schedule.kind == Kind::kStream && schedule.stream.leaves < shape.num_leaves) ||
      (schedule.kind == Kind::kTile && schedule.tile.split > 1);
  return CheckSchedule(schedule, shape, mappable).ok() && !(clusters && WithoutClusters());
}

std::vector<LinearSchedule> Tiles(const LinearShape& shape, bool mappable) {
  std::vector<LinearSchedule> tiles;
  for (const TileSchedule& tile : TileSchedules(shape)) {
    const LinearSchedule schedule = {.kind = LinearSchedule::Kind::kTile, .tile = tile};
    if (Usable(schedule, shape, mappable)) tiles.push_back(schedule);
  }
  return tiles;
}

// Picks about `wanted` of the schedules, or all if that is 0; of these the share that Scaled
// leaves.
std::vector<LinearSchedule> Thinned(std::vector<LinearSchedule> schedules, size_t wanted,
                                    Random& random) {
  if (wanted == 0) wanted = schedules.size();
  wanted = static_cast<size_t>(Scaled(static_cast<int>(wanted)));
  if (wanted >= schedules.size()) return schedules;
  std::shuffle(schedules.begin(), schedules.end(), random);
  schedules.resize(wanted);
  return schedules;
}

// Every schedule that computes a layer; if `wanted` is not 0, about that many, and one of tiles.
std::vector<LinearSchedule> Schedules(const LinearShape& shape, int64_t m, bool mappable,
                                      size_t wanted, Random& random) {
  std::vector<LinearSchedule> all = {{.kind = LinearSchedule::Kind::kGeneral}};
  for (const int columns : {8, 16, 32, 64}) {
    for (const int rows : {16, 32, 48, 64, 80, 128}) {
      for (int leaves = 1; leaves <= shape.num_leaves; leaves *= 2) {
        for (const int stages : {2, 3, 5}) {
          for (const int blocks : {1, 3, 132}) {
            all.push_back({.kind = LinearSchedule::Kind::kStream,
                           .stream = {.columns = columns,
                                      .rows = rows,
                                      .leaves = leaves,
                                      .stages = stages,
                                      .blocks = blocks}});
          }
        }
      }
    }
  }
  const auto unusable = [&](const LinearSchedule& schedule) {
    return !Usable(schedule, shape, mappable);
  };
  std::erase_if(all, unusable);
  all = Thinned(std::move(all), wanted, random);
  const std::vector<LinearSchedule> tiles =
      Thinned(Tiles(shape, mappable), wanted == 0 ? 0 : 1, random);
  all.insert(all.end(), tiles.begin(), tiles.end());
  all.push_back(ChooseLinear(kH200, shape, m, mappable));
  if (unusable(all.back())) all.pop_back();
  return all;
}

int64_t launches = 0;

// Runs schedules of a problem; stops the program at the first failed launch.
void ExpectCpuBits(const Problem& p, const std::vector<LinearSchedule>& schedules) {
  const Bits expected = CpuBits(p);
  OnDevice device(p);
  for (const LinearSchedule& schedule : schedules) {
    SCOPED_TRACE(absl::StrCat(Describe(schedule), ": ", Describe(p)));
    device.Poison();
    const absl::Status status = LaunchLinearAs(schedule, device.Args(), OnH200());
    ASSERT_TRUE(status.ok()) << status.message();
    ++launches;
    ASSERT_TRUE(SameBits(device.Read(), expected, p.columns()));
  }
}

void ExpectCpuBits(const Problem& p, size_t wanted, Random& random) {
  ExpectCpuBits(p, Schedules(p.shape, p.m, p.mappable(), wanted, random));
}

int64_t Below(int64_t n, Random& random) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}

contract::LeafPlan RandomPlan(Random& random) {
  switch (Below(6, random)) {
    case 0:
      return contract::PlanColumns(1 + Below(100, random));
    case 1:
      return contract::PlanColumns(1 + Below(1200, random));
    case 2:
      return contract::PlanColumns(128 * (1 + Below(6, random)));
    case 3:
      return contract::PlanColumns(512 * (1 + Below(4, random)));
    case 4:
      return contract::PlanKvHeads(1 + Below(10, random), 16 * (1 + Below(9, random)));
    default:
      return contract::PlanKvHeads(1 + Below(10, random), 1 + Below(90, random));
  }
}

Problem RandomProblem(Random& random, int64_t max_rows = 80) {
  Problem p;
  const bool row_parallel = Below(2, random) == 0;
  const int size = row_parallel ? 1 << Below(4, random) : 1;
  const int64_t n = Below(3, random) == 0 ? 1 + Below(40, random) : 1 + Below(300, random);
  p.shape = ShapeOf(n, RandomPlan(random), static_cast<int>(Below(size, random)), size,
                    row_parallel ? LeafSum::kTree : LeafSum::kChain);
  if (!row_parallel && Below(2, random) == 0) {
    p.shape.gated = true;
    p.shape.n = 2 * ((n + 1) / 2);
  }
  p.m = Below(4, random) == 0 ? 1 + Below(8, random) : 1 + Below(max_rows, random);
  p.output = static_cast<Output>(Below(p.shape.gated ? 3 : 2, random));
  const bool odd = Below(4, random) == 0;
  p.ldx = odd ? p.shape.k + Below(9, random) : (p.shape.k + 7) / 8 * 8 + 8 * Below(3, random);
  p.ldx = std::max<int64_t>(p.ldx, 8);
  p.x_offset = odd ? 2 * static_cast<size_t>(Below(8, random)) : 0;
  p.ldy = p.columns() + (Below(2, random) == 0 ? Below(9, random) : 0);
  p.y_offset = (p.output == Output::kFp32 ? 4 : 2) * static_cast<size_t>(Below(3, random));
  Fill(p, kFamilies[Below(std::size(kFamilies), random)], Below(2, random) == 0, random);
  return p;
}

class LinearTest : public testing_support::GpuTest {
 protected:
  void TearDown() override { std::printf("launches so far: %ld\n", static_cast<long>(launches)); }
};

TEST_F(LinearTest, RandomProblems) {
  Random random(1);
  for (int i = 0; i < Scaled(1500) && !HasFatalFailure(); ++i) {
    ExpectCpuBits(RandomProblem(random), 5, random);
  }
}

// Every tile schedule, over rows that end anywhere in a tile.
TEST_F(LinearTest, TilesOfManyRows) {
  Random random(9);
  for (int i = 0; i < Scaled(400) && !HasFatalFailure(); ++i) {
    const Problem p = RandomProblem(random, 400);
    ExpectCpuBits(p, Thinned(Tiles(p.shape, p.mappable()), 0, random));
  }
}

// More tiles than blocks that run at once, leaves of several blocks of K, and a ring that wraps
// around.
TEST_F(LinearTest, TilesLargerThanAWave) {
  Random random(10);
  for (const auto& [n, k, m] : std::vector<std::array<int64_t, 3>>{
           {2100, 1024, 1300}, {520, 4096, 600}, {1600, 576, 900}}) {
    for (const LeafSum sum : {LeafSum::kChain, LeafSum::kTree}) {
      for (const Output output : {Output::kBf16, Output::kFp32, Output::kSwiGlu}) {
        Problem p{.shape = ShapeOf(n, contract::PlanColumns(k), 0, 1, sum), .m = m};
        p.shape.gated = output == Output::kSwiGlu;
        p.output = output;
        p.ldx = k;
        p.ldy = p.columns();
        Fill(p, Family::kNormal, true, random);
        ExpectCpuBits(p, Thinned(Tiles(p.shape, true), 0, random));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(LinearTest, EveryScheduleOfSomeProblems) {
  Random random(2);
  for (const auto& [n, k, m] : std::vector<std::array<int64_t, 3>>{
           {200, 1024, 17}, {136, 2048, 64}, {64, 4096, 1}, {330, 700, 9}}) {
    for (const LeafSum sum : {LeafSum::kChain, LeafSum::kTree}) {
      for (const bool gated : {false, true}) {
        Problem p{.shape = ShapeOf(n, contract::PlanColumns(k), 0, 1, sum), .m = m};
        p.shape.gated = gated;
        p.output = gated ? Output::kSwiGlu : Output::kFp32;
        p.ldx = (k + 7) / 8 * 8;
        p.ldy = p.columns() + 1;
        Fill(p, Family::kWide, true, random);
        ExpectCpuBits(p, 0, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Shares of rows that begin anywhere in a tile, more rows than the blocks take in one pass, and a
// ring that wraps around many times.
TEST_F(LinearTest, LargerThanAWave) {
  Random random(3);
  for (const int64_t n : {9000, 20000}) {
    for (const bool gated : {false, true}) {
      Problem p{.shape = ShapeOf(n, contract::PlanColumns(384), 0, 1, LeafSum::kChain), .m = 5};
      p.shape.gated = gated;
      p.output = gated ? Output::kSwiGlu : Output::kBf16;
      p.ldx = p.shape.k;
      p.ldy = p.columns();
      Fill(p, Family::kNormal, false, random);
      ExpectCpuBits(p, 20, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Infinities and NaN reach exactly the outputs that the contract says: next to a leaf's end, in
// neighbouring rows, in weights. The output is bf16, where every NaN has the same bits.
TEST_F(LinearTest, NonFiniteOperands) {
  Random random(4);
  for (int i = 0; i < Scaled(200) && !HasFatalFailure(); ++i) {
    Problem p = RandomProblem(random);
    if (p.output == Output::kFp32) {
      p.output = Output::kBf16;
      p.y_offset = 0;
    }
    for (const Bf16 special : {0x7f80, 0xff80, 0x7fc0}) {
      const int64_t row = Below(p.m, random);
      const int leaf = static_cast<int>(Below(p.shape.num_leaves, random));
      const int64_t column = std::min(p.shape.bounds[leaf] + Below(2, random), p.shape.k - 1);
      if (p.shape.k == 0) continue;
      p.x[static_cast<size_t>(row * p.ldx + column)] = special;
      if (Below(3, random) == 0) p.w[static_cast<size_t>(random() % p.w.size())] = special;
    }
    ExpectCpuBits(p, 5, random);
  }
}

Problem Cancelling(int64_t k, LeafSum sum) {
  Random random(5);
  Problem p{.shape = ShapeOf(200, contract::PlanColumns(k), 0, 1, sum), .m = 24};
  p.output = Output::kFp32;
  p.ldx = k;
  p.ldy = p.columns();
  Fill(p, Family::kNormal, false, random);
  testing_support::CancelLeaves(p.shape, p.m, &p.x, &p.w);
  return p;
}

TEST_F(LinearTest, CancellingLeaves) {
  Random random(6);
  for (const int64_t k : {512, 640, 1024}) {
    for (const LeafSum sum : {LeafSum::kChain, LeafSum::kTree}) {
      ExpectCpuBits(Cancelling(k, sum), 0, random);
      if (HasFatalFailure()) return;
    }
  }
}

// Control test: a kernel that adds the leaves in the other order would fail the tests above.
TEST_F(LinearTest, CancellingLeavesTellChainFromTree) {
  Problem p = Cancelling(512, LeafSum::kTree);
  const Bits tree = CpuBits(p);
  p.shape.sum = LeafSum::kChain;
  Random random(7);
  OnDevice device(p);
  for (const LinearSchedule& schedule : Schedules(p.shape, p.m, true, 20, random)) {
    ASSERT_TRUE(LaunchLinearAs(schedule, device.Args(), OnH200()).ok());
    const Bits chain = device.Read();
    int64_t unequal = 0;
    for (size_t i = 0; i < chain.size(); ++i) unequal += chain[i] != tree[i];
    EXPECT_GT(unequal, p.m * p.shape.n / 2);
  }
}

TEST_F(LinearTest, NothingToDo) {
  const LinearShape none = ShapeOf(0, contract::PlanColumns(64), 0, 1, LeafSum::kChain);
  const LinearShape some = ShapeOf(8, contract::PlanColumns(64), 0, 1, LeafSum::kChain);
  EXPECT_TRUE(cuda::Run(LinearArgs{.m = 3, .weight = {.shape = none}}, {}).ok());
  EXPECT_TRUE(cuda::Run(LinearArgs{.m = 0, .weight = {.shape = some}}, {}).ok());
}

// Layers whose outputs are the next layers' inputs, as dependent launches on two streams at once
// and in a replayed graph. It shows if a kernel reads x before its predecessor has written it, or
// lets its successor start too early.
class LayerChain {
 public:
  LayerChain(int64_t width, int64_t m, uint64_t seed) {
    Random random(seed);
    for (int i = 0; i < kLayers; ++i) {
      Problem p{.shape = ShapeOf(width, contract::PlanColumns(width), 0, 1,
                                 i % 2 == 0 ? LeafSum::kChain : LeafSum::kTree),
                .m = m};
      p.ldx = p.ldy = width;
      Fill(p, Family::kNormal, false, random);
      if (i > 0) {
        for (size_t j = 0; j < p.x.size(); ++j) {
          p.x[j] = static_cast<Bf16>(outputs_.back()[j]);
        }
      }
      outputs_.push_back(CpuBits(p));
      problems_.push_back(std::move(p));
    }
    for (const Problem& p : problems_) devices_.push_back(std::make_unique<OnDevice>(p));
  }

  void Poison() {
    for (const auto& device : devices_) device->Poison();
  }
  void Launch(cudaStream_t stream, const LinearSchedule* forced) {
    const Bf16* x = devices_[0]->Args().x;
    for (const auto& device : devices_) {
      LinearArgs args = device->Args();
      args.x = x;
      x = args.bf16_out;
      const Stream on = OnH200(stream);
      const absl::Status status =
          forced == nullptr ? cuda::Run(args, on) : LaunchLinearAs(*forced, args, on);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
  void ExpectBits() {
    for (size_t i = 0; i < devices_.size(); ++i) {
      ASSERT_TRUE(SameBits(devices_[i]->Read(), outputs_[i], problems_[i].columns()))
          << "layer " << i;
    }
  }

 private:
  static constexpr int kLayers = 6;
  std::vector<Problem> problems_;
  std::vector<Bits> outputs_;
  std::vector<std::unique_ptr<OnDevice>> devices_;
};

TEST_F(LinearTest, DependentLayersOnTwoStreamsAndInGraphs) {
  Random random(8);
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) {
    ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  for (const int64_t m : {1, 16, 64}) {
    LayerChain first(512, m, 10);
    LayerChain second(1024, m, 11);
    // The schedules that both sums have.
    const LinearShape tree = ShapeOf(512, contract::PlanColumns(512), 0, 1, LeafSum::kTree);
    const LinearShape chain = ShapeOf(512, contract::PlanColumns(512), 0, 1, LeafSum::kChain);
    std::vector<LinearSchedule> schedules = Schedules(tree, m, true, 12, random);
    for (const LinearSchedule& tile : Thinned(Tiles(tree, true), 0, random)) {
      schedules.push_back(tile);
    }
    std::erase_if(schedules,
                  [&](const LinearSchedule& schedule) { return !Usable(schedule, chain, true); });
    for (const LinearSchedule& schedule : schedules) {
      SCOPED_TRACE(absl::StrCat(Describe(schedule), ", m ", m));
      first.Poison();
      second.Poison();
      for (int repeat = 0; repeat < Scaled(5); ++repeat) {
        first.Launch(streams[0], &schedule);
        second.Launch(streams[1], &schedule);
      }
      first.ExpectBits();
      second.ExpectBits();
      if (HasFatalFailure()) return;
    }
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
    const LinearSchedule* const chosen = WithoutClusters() ? &schedules.front() : nullptr;
    first.Launch(streams[0], chosen);
    second.Launch(streams[0], chosen);
    ISOBIT_CHECK_CUDA(cudaStreamEndCapture(streams[0], &graph));
    ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    for (int replay = 0; replay < Scaled(3); ++replay) {
      first.Poison();
      second.Poison();
      for (int i = 0; i < 4; ++i) ISOBIT_CHECK_CUDA(cudaGraphLaunch(executable, streams[0]));
      first.ExpectBits();
      second.ExpectBits();
      if (HasFatalFailure()) return;
    }
    ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(executable));
    ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
  }
  for (cudaStream_t stream : streams) ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace isobit::cuda
