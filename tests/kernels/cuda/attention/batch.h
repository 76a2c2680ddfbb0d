// Random batches of sequences over scattered, poisoned pages, for the tests of attention: in host
// memory with the CPU backend's results, and the same in GPU memory.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_ATTENTION_BATCH_H_
#define ISOBIT_TESTS_KERNELS_CUDA_ATTENTION_BATCH_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "kernels/cuda/sm90/attention/attention.h"
#include "kernels/cuda/sm90/attention/decode.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::OnH200;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::SameBits;

constexpr Bf16 kPoison = 0xffff;

inline int64_t Below(Random& random, int64_t n) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}
template <typename T>
T OneOf(Random& random, std::initializer_list<T> values) {
  return values.begin()[Below(random, static_cast<int64_t>(values.size()))];
}
// A number from 1 to max; every binade is equally likely.
inline int64_t LogUniform(Random& random, int64_t max) {
  int64_t bound = 1;
  while (bound < max && Below(random, 8) != 0) bound *= 2;
  return 1 + Below(random, std::min(bound, max));
}

struct Rows {
  int64_t rows = 1;
  int64_t first_position = 0;
  int64_t shared_pages = 0;  // leading pages that are those of the sequence before
};

struct Shape {
  int32_t heads = 1;
  int32_t kv_heads = 1;
  int32_t head_dim = 128;
  int32_t page_size = 16;
  int64_t window = 0;
  int64_t q_gap = 0;    // ldq beyond the heads
  int64_t out_gap = 0;  // likewise ldo
  size_t q_offset = 0;  // bytes
  Family family = Family::kNormal;

  int64_t columns() const { return int64_t{heads} * head_dim; }
  std::string Describe() const {
    return absl::StrCat("heads ", heads, "/", kv_heads, " head_dim ", head_dim, " page ", page_size,
                        " window ", window);
  }
};

inline Backend& Reference() {
  static Backend* const ops =
      MakeCpuBackend({.num_threads = static_cast<int>(std::thread::hardware_concurrency())})
          .release();
  return *ops;
}

// n random values: a run of a pool, because drawing hundreds of millions of values takes long.
inline const Bf16* SomeOf(Family family, int64_t n, Random& random) {
  constexpr int64_t kPool = 1 << 20;
  static const auto* const pools = [] {
    auto* const all = new std::vector<std::vector<Bf16>>;
    Random pool_random(1000);
    for (const Family f : testing_support::kFamilies) {
      all->push_back(RandomBf16(f, kPool, pool_random));
    }
    return all;
  }();
  const auto& pool = (*pools)[static_cast<size_t>(family)];
  return pool.data() + Below(random, kPool - n);
}

// A batch in host memory: pages are distributed at random, and everything unwritten is NaN.
class Batch {
 public:
  Batch(const Shape& shape, const std::vector<Rows>& sequences, uint64_t seed) : shape_(shape) {
    Random random(seed);
    int64_t pages = 2;
    for (const Rows& s : sequences) pages += PagesOf(s) - s.shared_pages;
    std::vector<int32_t> free(static_cast<size_t>(pages));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    const auto cache = static_cast<size_t>(pages * shape.kv_heads * shape.page_size) *
                       static_cast<size_t>(shape.head_dim);
    k_.assign(cache, kPoison);
    v_.assign(cache, kPoison);
    tables_.reserve(sequences.size());
    for (const Rows& s : sequences) {
      const auto count = static_cast<ptrdiff_t>(PagesOf(s) - s.shared_pages);
      std::vector<int32_t> table;
      if (s.shared_pages > 0) {
        table.assign(tables_.back().begin(), tables_.back().begin() + s.shared_pages);
      }
      table.insert(table.end(), free.end() - count, free.end());
      tables_.push_back(std::move(table));
      free.resize(free.size() - static_cast<size_t>(count));
      host_.push_back({rows_, s.rows, s.first_position, tables_.back().data()});
      rows_ += s.rows;
      if (s.rows > 0) Fill(tables_.back(), s.first_position + s.rows, random);
    }
    q_.resize(static_cast<size_t>(rows_ * ldq()));
    for (int64_t r = 0; r < rows_; ++r) {
      std::copy_n(SomeOf(shape.family, ldq(), random), ldq(), q_.data() + r * ldq());
    }
  }

  const Shape& shape() const { return shape_; }
  std::vector<SequenceRows>& host() { return host_; }
  std::vector<std::vector<int32_t>>& tables() { return tables_; }
  std::vector<Bf16>& k() { return k_; }
  std::vector<Bf16>& v() { return v_; }
  std::vector<Bf16>& q() { return q_; }
  int64_t rows() const { return rows_; }
  int64_t ldq() const { return shape_.columns() + shape_.q_gap; }
  int64_t ldo() const { return shape_.columns() + shape_.out_gap; }

  AttentionArgs Args(const Bf16* q, Bf16* k, Bf16* v, Bf16* out) const {
    AttentionArgs args;
    args.q = q;
    args.ldq = ldq();
    args.heads = shape_.heads;
    args.sequences.host = host_;
    args.kv = {k, v, shape_.page_size, shape_.kv_heads, shape_.head_dim};
    args.scale = contract::AttentionScale(shape_.head_dim);
    args.window = shape_.window;
    args.out = out;
    args.ldo = ldo();
    return args;
  }

  // Poison where nothing is written.
  std::vector<Bf16> Expected() {
    std::vector<Bf16> out(static_cast<size_t>(rows_ * ldo()), kPoison);
    EXPECT_TRUE(Reference().Run(Args(q_.data(), k_.data(), v_.data(), out.data())).ok());
    return out;
  }

 private:
  int64_t PagesOf(const Rows& s) const {
    return s.rows == 0 ? 0 : (s.first_position + s.rows + shape_.page_size - 1) / shape_.page_size;
  }
  void Fill(const std::vector<int32_t>& pages, int64_t positions, Random& random) {
    const int64_t d = shape_.head_dim;
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        const int64_t page = pages[static_cast<size_t>(p / shape_.page_size)];
        const int64_t slot = (page * shape_.kv_heads + h) * shape_.page_size + p % shape_.page_size;
        std::copy_n(SomeOf(shape_.family, d, random), d, k_.data() + slot * d);
        std::copy_n(SomeOf(shape_.family, d, random), d, v_.data() + slot * d);
      }
    }
  }

  Shape shape_;
  std::vector<SequenceRows> host_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<Bf16> k_;
  std::vector<Bf16> v_;
  std::vector<Bf16> q_;
  int64_t rows_ = 0;
};

// All schedules that support keys of this shape; clusters: 1, 2 and 7 for each block of rows.
inline std::vector<DecodeSchedule> DecodeSchedules(const Shape& shape) {
  std::vector<DecodeSchedule> schedules = {{DecodeSchedule::kTeams}};
  if (shape.head_dim % 8 == 0) {
    for (const int clusters : {1, 2, 7}) {
      schedules.push_back({DecodeSchedule::kClusters, clusters});
    }
  }
  return schedules;
}

// The same batch in GPU memory.
class DeviceBatch {
 public:
  using Launcher =
      std::function<absl::Status(const AttentionArgs&, const AttentionWorkspace&, const Stream&)>;

  explicit DeviceBatch(Batch& batch, const StepBounds& bounds = {})
      : batch_(batch),
        k_(batch.k()),
        v_(batch.v()),
        q_(batch.q(), batch.shape().q_offset),
        out_(batch.rows() * batch.ldo()) {
    Upload(bounds);
  }

  void Upload(const StepBounds& bounds, cudaStream_t stream = nullptr) {
    const std::vector<int32_t> ids(static_cast<size_t>(batch_.rows()), 1);
    const absl::Status status =
        upload_.Upload(ids, batch_.host(), batch_.shape().page_size, bounds, stream);
    EXPECT_TRUE(status.ok()) << status;
  }

  AttentionArgs Args() {
    AttentionArgs args = batch_.Args(q_.data(), k_.data(), v_.data(), out_.data());
    args.sequences.device = &upload_.device();
    return args;
  }
  const DeviceSequences& sequences() const { return upload_.device(); }
  DeviceBuffer<Bf16>& out() { return out_; }
  DeviceBuffer<Bf16>& k() { return k_; }
  DeviceBuffer<Bf16>& v() { return v_; }
  DeviceBuffer<Bf16>& q() { return q_; }
  StepTableUpload& upload() { return upload_; }

  // Launches into poisoned memory. Returns what was written; expects that no guard was touched.
  std::vector<Bf16> Run(const Launcher& launch, size_t workspace_bytes,
                        const Stream& stream = OnH200()) {
    out_.Poison();
    DeviceBuffer<std::byte> workspace(static_cast<int64_t>(workspace_bytes));
    const absl::Status status = launch(Args(), {workspace.data(), workspace_bytes}, stream);
    EXPECT_TRUE(status.ok()) << status;
    const std::vector<Bf16> actual = out_.CopyOut();
    EXPECT_TRUE(out_.GuardsIntact());
    EXPECT_TRUE(workspace.GuardsIntact());
    return actual;
  }
  std::vector<Bf16> Decode(int32_t max_tokens, const Stream& stream = OnH200()) {
    return Run(
        [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
          return LaunchDecodeAttention(args, *args.sequences.device, max_tokens, workspace, s);
        },
        DecodeWorkspaceBytes(Args(), sequences(), max_tokens), stream);
  }
  void ExpectOfEverySchedule(const std::vector<Bf16>& expected, int32_t max_tokens) {
    for (const DecodeSchedule& schedule : DecodeSchedules(batch_.shape())) {
      const std::vector<Bf16> actual = Run(
          [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
            return LaunchDecodeAttentionAs(schedule, args, *args.sequences.device, max_tokens,
                                           workspace, s);
          },
          DecodeWorkspaceBytes(Args(), sequences(), max_tokens));
      EXPECT_TRUE(SameBits<Bf16>(actual, expected))
          << "schedule " << schedule.kind << " " << schedule.clusters << ", "
          << batch_.shape().Describe();
    }
  }
  std::vector<Bf16> Walk() {
    return Run(
        [](const AttentionArgs& args, const AttentionWorkspace&, const Stream& s) {
          return LaunchWalkAttention(args, *args.sequences.device, 1, s);
        },
        0);
  }
  std::vector<Bf16> Front(const Stream& stream = OnH200()) {
    return Run(LaunchAttention, AttentionWorkspaceBytes(Args()), stream);
  }

 private:
  Batch& batch_;
  DeviceBuffer<Bf16> k_;
  DeviceBuffer<Bf16> v_;
  DeviceBuffer<Bf16> q_;
  DeviceBuffer<Bf16> out_;
  StepTableUpload upload_;
};

inline Shape RandomShape(Random& random) {
  Shape s;
  s.kv_heads = 1 + static_cast<int32_t>(Below(random, 3));
  s.heads = s.kv_heads * (1 + static_cast<int32_t>(Below(random, 16)));
  s.head_dim = OneOf(random, {2, 6, 16, 24, 32, 64, 64, 72, 80, 96, 128, 128, 128, 130, 144, 256});
  s.page_size = OneOf(random, {1, 3, 7, 8, 16, 16, 24, 32, 48, 64, 64, 128, 256, 1000, 1024});
  s.window = OneOf<int64_t>(random, {0, 0, 0, 0, 1, 40, 100, 129, 513, 1000, 100000});
  s.q_gap = OneOf<int64_t>(random, {0, 0, 8, 7});
  s.out_gap = OneOf<int64_t>(random, {0, 0, 8, 5});
  s.q_offset = OneOf<size_t>(random, {0, 0, 4, 2});
  s.family = testing_support::kFamilies[Below(random, 4)];
  return s;
}

inline std::vector<Rows> RandomRows(Random& random, int64_t max_rows, int64_t max_context) {
  std::vector<Rows> sequences(static_cast<size_t>(1 + Below(random, 8)));
  for (Rows& s : sequences) {
    s.rows = Below(random, max_rows + 1);  // 0: padding
    s.first_position = LogUniform(random, max_context) - 1;
  }
  sequences[0].rows = std::max<int64_t>(sequences[0].rows, 1);
  return sequences;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_TESTS_KERNELS_CUDA_ATTENTION_BATCH_H_
