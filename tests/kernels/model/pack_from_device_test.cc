// Packing from a device's memory gives the bytes and the digest of PackModel, whoever holds which
// part of a tensor, whether it is read or sent, for any number of ranks, and wherever the packed
// blocks are to go. The device is the host here; cuda_device_packer_test compares a GPU with it,
// and tests/torch/nccl_weights_test.py sends by NCCL.
#include "kernels/model/pack_from_device.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/digest.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/sent_weights.h"
#include "tests/support/held_weight_senders.h"
#include "tests/support/held_weights.h"
#include "tests/support/host_packer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing_support::HeldSource;
using testing_support::HeldWeights;
using testing_support::HeldWeightSenders;
using testing_support::Hold;
using testing_support::HoldingRules;
using testing_support::StatusIs;

// A packer that maps the holders' memory, and to which they send.
class HeldPacker final : public testing_support::HostPacker {
 public:
  HeldPacker(const HeldWeights& held, std::vector<size_t>& mapped)
      : held_(held), mapped_(mapped), senders_(held) {}
  ~HeldPacker() override { EXPECT_EQ(senders_.num_kept(), 0U); }
  absl::StatusOr<ForeignMemory> MapForeign(const std::string& handle) override {
    mapped_.push_back(std::stoul(handle));
    const std::vector<std::byte>& memory = held_.memory[mapped_.back()];
    return ForeignMemory{memory.data(), memory.size()};
  }
  HeldWeightSenders* senders() override { return &senders_; }

 private:
  const HeldWeights& held_;
  std::vector<size_t>& mapped_;
  HeldWeightSenders senders_;
};

// Blocks of `num_ranks` ranks. By turns they are packed in place, elsewhere for Put, and into host
// memory; for PackModel, which knows no devices, in the latter two ways.
class TurningStore final : public WeightStore {
 public:
  // held: null: nobody holds the weights.
  TurningStore(const ModelConfig& config, int num_ranks, const HeldWeights* held)
      : held_(held), mapped_(static_cast<size_t>(num_ranks)) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      layouts_.push_back(std::make_unique<WeightLayout>(
          config, *ShapeOfRank(config, rank, num_ranks), CpuWeightPacker()));
    }
  }
  absl::StatusOr<std::vector<PackTask>> Plan() override {
    std::vector<PackTask> tasks;
    for (size_t rank = 0; rank < layouts_.size(); ++rank) {
      for (int block = 0; block < layouts_[rank]->num_blocks(); ++block) {
        const size_t bytes = layouts_[rank]->BlockBytes(block) + 64;
        blocks_.push_back(AllocateAligned(bytes));
        std::memset(blocks_.back().get(), 0xee, bytes);
        sizes_.push_back(bytes);
        const bool waits = block % 3 == 1;
        tasks.push_back({.layout = layouts_[rank].get(),
                         .block = block,
                         .bytes = bytes,
                         .rank = rank,
                         .place = waits ? blocks_.back().get() : nullptr});
      }
    }
    return tasks;
  }
  absl::Status Put(const PackTask& task, const std::byte* packed) override {
    std::memcpy(PlaceOf(task), packed, task.bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker(size_t rank) override {
    return std::make_unique<HeldPacker>(*held_, mapped_[rank]);
  }
  std::byte* DevicePlaceOf(const PackTask& task) const override {
    return task.block % 3 == 0 ? PlaceOf(task) : nullptr;
  }

  // The memories that a rank has mapped, in order.
  const std::vector<size_t>& mapped(size_t rank) const { return mapped_[rank]; }

  std::vector<std::string> Digests() const {
    std::vector<std::string> digests;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      digests.push_back(Sha256Hex(blocks_[i].get(), sizes_[i]));
    }
    return digests;
  }

 private:
  std::byte* PlaceOf(const PackTask& task) const {
    const auto blocks = static_cast<size_t>(layouts_.front()->num_blocks());
    return blocks_[task.rank * blocks + static_cast<size_t>(task.block)].get();
  }

  const HeldWeights* const held_;
  std::vector<std::vector<size_t>> mapped_;  // [rank]
  std::vector<std::unique_ptr<WeightLayout>> layouts_;
  std::vector<AlignedBytes> blocks_;  // [rank][block]
  std::vector<size_t> sizes_;
};

struct Packed {
  std::string digest;
  std::vector<std::string> blocks;
};

enum class Way { kRead, kSent };

// Returns the digest.
absl::StatusOr<std::string> PackInto(TurningStore& store, const HeldWeights& held, Way way,
                                     bool allow_nonfinite = false) {
  const auto make_source =
      [&](size_t /*rank*/, size_t /*num_ranks*/,
          DevicePacker& packer) -> absl::StatusOr<std::unique_ptr<SliceSource>> {
    if (way == Way::kRead) return ReadBlocks(held.tensors, held.blocks);
    SenderGroup group;
    group.num_senders = static_cast<int>(held.memory.size());
    return ReceiveWeights(held.tensors, held.blocks, group, packer);
  };
  return PackFromDevice(
      held.tensors, make_source, [] { return absl::OkStatus(); }, store, allow_nonfinite);
}

absl::StatusOr<Packed> PackHeld(const HeldWeights& held, const ModelConfig& config, int num_ranks,
                                Way way = Way::kRead) {
  TurningStore store(config, num_ranks, &held);
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, PackInto(store, held, way));
  return Packed{std::move(digest), store.Digests()};
}

Packed PackAsFiles(const TensorSource& source, const ModelConfig& config, int num_ranks) {
  TurningStore store(config, num_ranks, nullptr);
  const auto digest = PackModel(source, "", store);
  ISOBIT_EXPECT_OK(digest);
  return {*digest, store.Digests()};
}

class PackFromDeviceTest : public testing::TestWithParam<ModelConfig> {
 protected:
  PackFromDeviceTest() {
    testing_support::WriteTinyModel(GetParam(), 1, root_.File("model"));
    checkpoint_ = std::make_unique<Checkpoint>(*Checkpoint::Open(root_.File("model")));
  }

  const testing_support::TempDir root_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

TEST_P(PackFromDeviceTest, GivesPackModelsBytesAndDigest) {
  const std::vector<HoldingRules> rules = {{},
                                           {.row_parts = 3},
                                           {.row_parts = 3, .apart = true},
                                           {.row_parts = 2, .column_parts = 2, .gap = 3},
                                           {.row_parts = 5, .gap = 1, .dtype = DType::kF32},
                                           {.column_parts = 2, .dtype = DType::kF32},
                                           {.row_parts = 2, .dtype = DType::kF16}};
  for (const HoldingRules& rule : rules) {
    const HeldWeights held = Hold(*checkpoint_, rule);
    ISOBIT_ASSERT_OK(ValidateBlocks(held.blocks, held.tensors));
    const HeldSource whole(held);
    for (const int ranks : {1, 2, 4, 8}) {
      const Packed expected = PackAsFiles(whole, GetParam(), ranks);
      for (const Way way : {Way::kRead, Way::kSent}) {
        ISOBIT_ASSERT_OK_AND_ASSIGN(const Packed packed, PackHeld(held, GetParam(), ranks, way));
        EXPECT_EQ(packed.digest, expected.digest) << ranks;
        EXPECT_EQ(packed.blocks, expected.blocks) << ranks;
      }
    }
  }
}

// What came before a group ended is worthless, though all of it seems to have come.
TEST_P(PackFromDeviceTest, AGroupThatEndedEndsThePacking) {
  HeldWeights held = Hold(*checkpoint_, {.row_parts = 2});
  held.ends_with = absl::UnavailableError("sender 1 has gone");
  EXPECT_THAT(PackHeld(held, GetParam(), 2, Way::kSent),
              StatusIs(absl::StatusCode::kUnavailable, "sender 1 has gone"));
}

// The control: one bit of any tensor changes the digest, for any number of ranks.
TEST_P(PackFromDeviceTest, OneBitOfAnyTensorIsSeen) {
  HeldWeights held = Hold(*checkpoint_, {.row_parts = 2});
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Packed before, PackHeld(held, GetParam(), 4));
  for (const WeightBlock& block : held.blocks.blocks) {
    std::byte& last =
        held.memory[block.holder][block.offset + static_cast<size_t>(block.num_rows - 1) *
                                                     static_cast<size_t>(block.row_stride) * 2];
    last ^= std::byte{1};
    ISOBIT_ASSERT_OK_AND_ASSIGN(const Packed after, PackHeld(held, GetParam(), 4));
    EXPECT_NE(after.digest, before.digest) << held.tensors[block.tensor].name;
    EXPECT_NE(after.blocks, before.blocks) << held.tensors[block.tensor].name;
    last ^= std::byte{1};
  }
}

// INVARIANT: a value that is not finite in bf16 is found, whoever holds it and sums it up.
TEST_P(PackFromDeviceTest, RefusesWhatIsNotFinite) {
  for (const HoldingRules& rule :
       std::vector<HoldingRules>{{},
                                 {.row_parts = 2, .column_parts = 2, .gap = 3},
                                 {.row_parts = 3, .dtype = DType::kF32}}) {
    HeldWeights held = Hold(*checkpoint_, rule);
    const size_t item = ItemSize(rule.dtype);
    for (const WeightBlock& block : held.blocks.blocks) {
      const Tensor& tensor = held.tensors[block.tensor];
      const int64_t row = block.num_rows - 1;
      const int64_t column = block.num_columns / 2;
      std::byte* const value = held.memory[block.holder].data() + block.offset +
                               static_cast<size_t>(row * block.row_stride + column) * item;
      const std::vector<std::byte> kept(value, value + item);
      const uint32_t bits = item == 4 ? 0x7f7fffff : 0x7fc0;  // finite in fp32, not in bf16; a NaN
      std::memcpy(value, &bits, item);
      std::string place = absl::StrCat("[", block.first_row + row);
      if (tensor.shape.size() > 1) absl::StrAppend(&place, ", ", block.first_column + column);
      for (const int ranks : {1, 4}) {
        for (const Way way : {Way::kRead, Way::kSent}) {
          EXPECT_THAT(PackHeld(held, GetParam(), ranks, way),
                      StatusIs(absl::StatusCode::kInvalidArgument,
                               testing::AllOf(testing::HasSubstr(tensor.name),
                                              testing::HasSubstr(place + "] is"))));
        }
      }
      TurningStore store(GetParam(), 2, &held);
      ISOBIT_EXPECT_OK(PackInto(store, held, Way::kRead, /*allow_nonfinite=*/true));
      std::copy(kept.begin(), kept.end(), value);
    }
  }
}

TEST_P(PackFromDeviceTest, SaysWhatIsWrong) {
  const HeldWeights held = Hold(*checkpoint_, {.row_parts = 2});
  HeldWeights shorter = held;
  for (auto& memory : shorter.memory) memory.resize(1);
  EXPECT_THAT(PackHeld(shorter, GetParam(), 2),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::ContainsRegex("^tensor \"model.*\": [0-9]+ bytes from [0-9]+, "
                                              "the memory has 1$")));
  TurningStore store(GetParam(), 2, &held);
  const auto fails = [](size_t, size_t,
                        DevicePacker&) -> absl::StatusOr<std::unique_ptr<SliceSource>> {
    return absl::DataLossError("gone");
  };
  EXPECT_THAT(PackFromDevice(
                  held.tensors, fails, [] { return absl::OkStatus(); }, store),
              StatusIs(absl::StatusCode::kDataLoss));
}

INSTANTIATE_TEST_SUITE_P(, PackFromDeviceTest,
                         testing::Values(testing_support::TinyConfig(Architecture::kQwen3),
                                         testing_support::TinyConfig(Architecture::kQwen2),
                                         testing_support::TinyConfig(Architecture::kLlama)),
                         [](const auto& info) { return absl::StrCat("Model", info.index); });

// Rank r of two reads the rows of q, gate and up that holder r has, and columns of all rows of o
// and down.
TEST(ReadBlocksTest, ARankMapsOnlyWhatItReads) {
  ModelConfig config = testing_support::TinyConfig(Architecture::kQwen3);
  config.num_heads = 8;  // two ranks share them equally
  config.num_kv_heads = 4;
  config.intermediate_size = 256;
  const testing_support::TempDir root;
  testing_support::WriteTinyModel(config, 1, root.File("model"));
  const Checkpoint checkpoint = *Checkpoint::Open(root.File("model"));

  const HeldWeights apart = Hold(checkpoint, {.row_parts = 2, .apart = true});
  TurningStore store(config, 2, &apart);
  ISOBIT_ASSERT_OK(PackInto(store, apart, Way::kRead).status());
  for (const WeightBlock& block : apart.blocks.blocks) {
    const std::string& name = apart.tensors[block.tensor].name;
    const auto is_of = [&](absl::Span<const char* const> layers) {
      return std::any_of(layers.begin(), layers.end(), [&](const char* layer) {
        return absl::StrContains(name, absl::StrCat(layer, "_proj.weight"));
      });
    };
    for (const size_t rank : {size_t{0}, size_t{1}}) {
      const std::vector<size_t>& mapped = store.mapped(rank);
      const auto times = std::count(mapped.begin(), mapped.end(), block.holder);
      if (is_of({"q", "gate", "up"})) {
        EXPECT_EQ(times, (block.first_row == 0) == (rank == 0) ? 1 : 0) << name << " " << rank;
      } else if (is_of({"o", "down"})) {
        EXPECT_EQ(times, 1) << name << " " << rank;
      }
    }
  }

  const HeldWeights together = Hold(checkpoint, {.row_parts = 2});
  TurningStore other(config, 2, &together);
  ISOBIT_ASSERT_OK(PackInto(other, together, Way::kRead).status());
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    EXPECT_THAT(other.mapped(rank), testing::UnorderedElementsAre(0, 1));
  }
}

}  // namespace
}  // namespace isobit
