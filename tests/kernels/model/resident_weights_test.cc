// Resident weights. Preparing them on all cores gives the bytes of serial packing. They serve from
// the switch on and not before, at an address that never changes, wherever they waited for the
// switch.
#include "kernels/model/resident_weights.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_device.h"
#include "kernels/plain_weight_packer.h"
#include "tests/support/all_tensors.h"
#include "tests/support/prepare_blocks.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tools/model_shapes.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

using testing_support::PrepareBlocks;
using testing_support::PreparedWeights;
using testing_support::StatusIs;

// How the memory of all ranks' devices behaves.
struct MemoryRules {
  size_t largest = SIZE_MAX;         // AllocateReleasable refuses more bytes
  size_t largest_beside = SIZE_MAX;  // AllocateBeside likewise
  absl::Status beside;               // or always answers with this error
  absl::Status upload;               // that of each Upload
  std::atomic<int> num_refused = 0;

  // Whether calls that take memory or give it back wait for one of another device.
  std::atomic<bool> wait = false;
  std::atomic<int> num_waiting = 0;
  std::atomic<bool> met = false;

  void Meet() {
    if (!wait || met) return;
    if (++num_waiting == 2) met = true;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!met && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    wait = met.load();
    --num_waiting;
  }
};

class RuledDevice final : public HostDevice {
 public:
  explicit RuledDevice(MemoryRules& rules) : rules_(rules) {}

  bool is_host() const override { return false; }  // blocks come by Upload

  absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) override {
    if (bytes <= rules_.largest) return HostDevice::AllocateReleasable(bytes);
    return absl::ResourceExhaustedError("full");
  }
  absl::StatusOr<Memory> AllocateBeside(size_t bytes) override {
    if (!rules_.beside.ok()) return rules_.beside;
    if (bytes > rules_.largest_beside) {
      ++rules_.num_refused;
      return absl::ResourceExhaustedError("full");
    }
    rules_.Meet();
    ISOBIT_ASSIGN_OR_RETURN(Memory memory, HostDevice::AllocateBeside(bytes));
    const auto free = memory.get_deleter();
    return Memory(memory.release(), [this, free](std::byte* p) {
      rules_.Meet();
      free(p);
    });
  }
  absl::Status Upload(void* to, const void* from, size_t bytes) override {
    return rules_.upload.ok() ? HostDevice::Upload(to, from, bytes) : rules_.upload;
  }

 private:
  MemoryRules& rules_;
};

// Gives the bytes of `once` where it is read for the first time, and those of `later` where it is
// read again.
class ChangingSource final : public TensorSource {
 public:
  ChangingSource(const Checkpoint& once, const Checkpoint& later) : once_(once), later_(later) {
    tensors_ = once.tensors();
  }
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    const std::lock_guard lock(mutex_);
    const bool is_first = read_.emplace(tensor, first).second;
    return (is_first ? once_ : later_).Read(tensor, first, size, out);
  }

 private:
  const Checkpoint& once_;
  const Checkpoint& later_;
  mutable std::mutex mutex_;
  mutable std::set<std::pair<size_t, size_t>> read_;  // guarded by mutex_
};

class ResidentWeightsTest : public testing::Test {
 protected:
  static constexpr int kRanks = 4;
  using Bytes = std::vector<std::vector<std::byte>>;  // [block]

  ResidentWeightsTest() : config_(*NamedModelShape("tiny-qwen2")) {
    for (const uint64_t seed : {1, 2}) {
      const std::string path = root_.File(std::to_string(seed));
      ISOBIT_EXPECT_OK(MakeRandomModel(config_, seed, path));
      checkpoints_.push_back(*Checkpoint::Open(path));
    }
    for (int r = 0; r < kRanks; ++r) {
      devices_.push_back(std::make_unique<RuledDevice>(rules_));
      layouts_.push_back(std::make_unique<WeightLayout>(config_, *ShapeOfRank(config_, r, kRanks),
                                                        CpuWeightPacker()));
      ranks_.push_back(*ResidentWeights::Create(*layouts_.back(), *devices_.back(),
                                                r == 0 ? nullptr : ranks_.front()->embedding()));
      pointers_.push_back(ranks_.back().get());
    }
  }

  absl::StatusOr<PreparedWeights> Prepare(int model, const std::string& expected_digest = "") {
    return PrepareBlocks(checkpoints_[static_cast<size_t>(model)], expected_digest, pointers_);
  }
  void Commit(const PreparedWeights& prepared) {
    for (size_t r = 0; r < ranks_.size(); ++r)
      ISOBIT_EXPECT_OK(ranks_[r]->Commit(prepared.ranks.blocks[r]));
  }
  void Load(int model) {
    const auto prepared = Prepare(model);
    ISOBIT_ASSERT_OK(prepared);
    Commit(*prepared);
  }

  // The weights that serve on a rank.
  Bytes Serving(size_t r) const {
    Bytes blocks;
    for (int block = 0; block < layouts_[r]->num_blocks(); ++block) {
      const std::byte* bytes = *ranks_[r]->Acquire(block);
      blocks.emplace_back(bytes, bytes + layouts_[r]->BlockBytes(block));
    }
    return blocks;
  }
  // One block after the other, by itself.
  Bytes Packed(int model, size_t r) const {
    Bytes blocks;
    const TensorSet tensors = testing_support::AllTensors(checkpoints_[static_cast<size_t>(model)]);
    for (int block = 0; block < layouts_[r]->num_blocks(); ++block) {
      const AlignedBytes packed = AllocateAligned(layouts_[r]->BlockBytes(block));
      layouts_[r]->PackBlock(tensors, block, packed.get());
      blocks.emplace_back(packed.get(), packed.get() + layouts_[r]->BlockBytes(block));
    }
    return blocks;
  }
  void ExpectServing(int model) const {
    for (size_t r = 0; r < ranks_.size(); ++r) EXPECT_EQ(Serving(r), Packed(model, r)) << r;
  }

  const testing_support::TempDir root_;
  const ModelConfig config_;
  std::vector<Checkpoint> checkpoints_;
  MemoryRules rules_;
  std::vector<std::unique_ptr<RuledDevice>> devices_;
  std::vector<std::unique_ptr<WeightLayout>> layouts_;
  std::vector<std::unique_ptr<ResidentWeights>> ranks_;
  std::vector<ResidentWeights*> pointers_;
};

TEST_F(ResidentWeightsTest, TheFirstGoStraightToTheirPlace) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights prepared, Prepare(0));
  for (const PreparedBlocks& blocks : prepared.ranks.blocks) {
    for (const Memory& block : blocks) EXPECT_EQ(block, nullptr);
  }
  Commit(prepared);
  ExpectServing(0);
}

TEST_F(ResidentWeightsTest, RanksWithoutWeightsRefuseAnotherDigest) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights prepared, Prepare(0));
  const std::vector<ResidentWeights*> none(kRanks, nullptr);
  const auto prepare = [&](const std::string& expected) {
    return PrepareBlocks(checkpoints_[0], expected, none);
  };
  for (const std::string& expected : {std::string(), prepared.digest}) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights read, prepare(expected));
    EXPECT_EQ(read.digest, prepared.digest);
  }
  EXPECT_THAT(prepare(std::string(64, '0')).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, testing::HasSubstr(prepared.digest)));
}

TEST_F(ResidentWeightsTest, UpdatesInPlace) {
  Load(0);
  std::vector<const std::byte*> places;
  for (const auto& rank : ranks_) {
    for (int block = 0; block < layouts_[0]->num_blocks(); ++block) {
      places.push_back(*rank->Acquire(block));
    }
  }
  ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights prepared, Prepare(1));
  ExpectServing(0);
  Commit(prepared);
  ExpectServing(1);
  auto place = places.begin();
  for (const auto& rank : ranks_) {
    for (int block = 0; block < layouts_[0]->num_blocks(); ++block) {
      EXPECT_EQ(*rank->Acquire(block), *place++) << block;
    }
  }
}

TEST_F(ResidentWeightsTest, WhatHasNoRoomInTheBackendWaitsInHostMemory) {
  Load(0);
  const size_t layer = layouts_[0]->BlockBytes(1);
  for (const size_t largest : {size_t{0}, layer}) {
    for (const int model : {1, 0}) {
      rules_.largest_beside = largest;
      rules_.num_refused = 0;
      Load(model);
      EXPECT_GT(rules_.num_refused, 0);
      ExpectServing(model);
    }
  }
}

// A GPU needs tens of milliseconds for either.
TEST_F(ResidentWeightsTest, DevicesTakeMemoryAndGiveItBackAtTheSameTime) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "SKIPPED: one core";
  Load(0);
  rules_.wait = true;
  {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights prepared, Prepare(1));
    EXPECT_TRUE(rules_.met) << "to take it";
    Commit(prepared);
    rules_.met = false;
    rules_.wait = true;
  }
  EXPECT_TRUE(rules_.met) << "to give it back";
  ExpectServing(1);
}

TEST_F(ResidentWeightsTest, ErrorsLeaveTheOldOnesServing) {
  Load(0);
  rules_.upload = absl::DataLossError("upload");
  EXPECT_THAT(Prepare(1), StatusIs(absl::StatusCode::kDataLoss));
  rules_.upload = absl::OkStatus();
  rules_.beside = absl::InternalError("allocation");
  EXPECT_THAT(Prepare(1), StatusIs(absl::StatusCode::kInternal));
  rules_.beside = absl::OkStatus();
  ExpectServing(0);
  Load(1);
  ExpectServing(1);
}

TEST_F(ResidentWeightsTest, OtherWeightsThanExpectedAreNotPrepared) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests first, DigestTensors(checkpoints_[0]));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights prepared, Prepare(0, first.checkpoint));
  EXPECT_EQ(prepared.digest, first.checkpoint);
  Commit(prepared);
  EXPECT_THAT(Prepare(1, first.checkpoint), StatusIs(absl::StatusCode::kFailedPrecondition));
  ExpectServing(0);
}

TEST_F(ResidentWeightsTest, TheDigestIsThatOfThePackedBytes) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests first, DigestTensors(checkpoints_[0]));
  const ChangingSource source(checkpoints_[0], checkpoints_[1]);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const PreparedWeights prepared, PrepareBlocks(source, "", pointers_));
  EXPECT_EQ(prepared.digest, first.checkpoint);
  Commit(prepared);
  ExpectServing(0);
}

TEST_F(ResidentWeightsTest, RanksInOneMemoryShareTheEmbedding) {
  const size_t embedding = layouts_[0]->BlockBytes(0);
  EXPECT_EQ(*ranks_[3]->Acquire(0), *ranks_[0]->Acquire(0));
  size_t rest = 0;
  for (int block = 1; block < layouts_[3]->num_blocks(); ++block) {
    rest += RoundUp(layouts_[3]->BlockBytes(block), 256);
  }
  EXPECT_EQ(ranks_[3]->bytes(), rest);
  EXPECT_GT(ranks_[0]->bytes(), embedding);
}

TEST_F(ResidentWeightsTest, GivesItsMemoryBackAndFillsItAnew) {
  Load(0);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::byte* const address, ranks_[1]->Acquire(1));
  const size_t bytes = ranks_[1]->bytes();
  for (const auto& rank : ranks_) ISOBIT_ASSERT_OK(rank->ReleaseMemory());
  EXPECT_EQ(ranks_[1]->bytes(), 0u);
  EXPECT_FALSE(ranks_[1]->loaded());
  Load(1);
  EXPECT_EQ(ranks_[1]->bytes(), bytes);
  EXPECT_EQ(*ranks_[1]->Acquire(1), address);
  ExpectServing(1);
}

// What a rank keeps behind its blocks is in their memory, and no update writes there.
TEST_F(ResidentWeightsTest, HasRoomForCopies) {
  const PlainWeightPacker packer;
  const WeightLayout copies = WeightLayout::WithCopies(*layouts_[3], packer);
  ranks_[3] = *ResidentWeights::Create(*layouts_[3], *devices_[3], ranks_[0]->embedding(), &copies);
  pointers_[3] = ranks_[3].get();
  size_t bytes = 0;
  for (int block = 1; block < copies.num_blocks(); ++block) {
    bytes += RoundUp(copies.BlockBytes(block), 256);
  }
  ASSERT_EQ(ranks_[3]->bytes(), bytes);
  std::vector<absl::Span<std::byte>> behind;
  for (int block = 1; block < copies.num_blocks(); ++block) {
    auto* const begin = const_cast<std::byte*>(*ranks_[3]->Acquire(block));
    behind.emplace_back(begin + layouts_[3]->BlockBytes(block),
                        copies.BlockBytes(block) - layouts_[3]->BlockBytes(block));
    EXPECT_FALSE(behind.back().empty());
    std::ranges::fill(behind.back(), std::byte{7});
  }
  for (const int model : {0, 1}) {
    Load(model);
    ExpectServing(model);
    for (const absl::Span<std::byte> copy : behind) {
      EXPECT_TRUE(std::ranges::all_of(copy, [](std::byte b) { return b == std::byte{7}; }));
    }
  }
  ISOBIT_ASSERT_OK(ranks_[3]->ReleaseMemory());
  EXPECT_EQ(ranks_[3]->bytes(), 0u);
}

TEST_F(ResidentWeightsTest, SaysThatTheyDoNotFit) {
  rules_.largest = ranks_[0]->bytes() - 1;
  EXPECT_THAT(ResidentWeights::Create(*layouts_[0], *devices_[0]),
              StatusIs(absl::StatusCode::kResourceExhausted));
}

}  // namespace
}  // namespace isobit
