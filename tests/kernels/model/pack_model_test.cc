// The pass over a model's weights: which blocks are packed together, and that weights may arrive
// over time instead of being in files.
#include "kernels/model/pack_model.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/digest.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "kernels/plain_weight_packer.h"
#include "tests/support/drawn_weights.h"
#include "tests/support/status_matchers.h"
#include "tools/model_shapes.h"

namespace isobit {
namespace {

using testing_support::DrawnWeights;
using testing_support::StatusIs;

const WeightPacker& Packer() {
  static const PlainWeightPacker packer;
  return packer;
}

// DrawnWeights, sent in pieces by a separate thread. The source keeps a piece until it is read,
// and the sender waits while more than `max_bytes` are kept.
class SentSource final : public DrawnWeights {
 public:
  SentSource(const ModelPlan& plan, std::vector<size_t> order, size_t max_bytes,
             size_t num_sent = SIZE_MAX)
      : DrawnWeights(plan), order_(std::move(order)), max_bytes_(max_bytes), rank_(order_.size()) {
    for (size_t i = 0; i < order_.size(); ++i) rank_[order_[i]] = i;
    arrived_.resize(order_.size());
    sender_ = std::thread([this, num_sent] { Send(std::min(num_sent, order_.size())); });
  }
  ~SentSource() override { sender_.join(); }

  size_t ArrivalOf(size_t tensor) const override { return rank_[tensor]; }

  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    std::unique_lock lock(mutex_);
    EXPECT_EQ(read_[tensor], first) << "each byte once, from the first to the last";
    read_[tensor] = first + size;
    const std::vector<uint8_t>& arrived = arrived_[tensor];
    for (size_t end = first + size; first < end;) {
      changed_.wait(lock, [&] { return ended_ || arrived.size() > first; });
      if (arrived.size() <= first) return absl::DataLossError("the sender has gone");
      const size_t now = std::min(arrived.size(), end) - first;
      std::memcpy(out, arrived.data() + first, now);
      out += now;
      first += now;
      kept_ -= now;
      changed_.notify_all();
    }
    return absl::OkStatus();
  }

 private:
  void Send(size_t num_tensors) {
    constexpr size_t kPiece = 1000;
    for (size_t i = 0; i < num_tensors; ++i) {
      const size_t tensor = order_[i];
      const size_t bytes = tensors_[tensor].size_bytes;
      for (size_t first = 0; first < bytes; first += kPiece) {
        std::vector<uint8_t> piece(std::min(kPiece, bytes - first));
        static_cast<void>(DrawnWeights::Read(tensor, first, piece.size(), piece.data()));
        std::unique_lock lock(mutex_);
        // A reader that asks in another order than that of arrival would wait for ever.
        const bool in_time =
            changed_.wait_for(lock, std::chrono::seconds(10), [&] { return kept_ <= max_bytes_; });
        if (!in_time) {
          ADD_FAILURE() << "nobody takes what has arrived";
          ended_ = true;
          changed_.notify_all();
          return;
        }
        arrived_[tensor].insert(arrived_[tensor].end(), piece.begin(), piece.end());
        kept_ += piece.size();
        changed_.notify_all();
      }
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

  const std::vector<size_t> order_;  // tensors, as they are sent
  const size_t max_bytes_;
  std::vector<size_t> rank_;  // [tensor], in `order_`
  mutable std::mutex mutex_;  // guards what follows
  mutable std::condition_variable changed_;
  std::vector<std::vector<uint8_t>> arrived_;  // [tensor]
  mutable std::map<size_t, size_t> read_;      // bytes, by tensor
  mutable size_t kept_ = 0;                    // bytes that have arrived and were not read
  bool ended_ = false;
  std::thread sender_;
};

// Keeps the blocks of two ranks in host memory; the second rank's blocks arrive through Put.
class HostStore final : public WeightStore {
 public:
  explicit HostStore(const ModelPlan& plan) {
    for (int rank = 0; rank < 2; ++rank) {
      layouts_.push_back(
          std::make_unique<WeightLayout>(plan, *ShapeOfRank(plan.config, rank, 2), Packer()));
    }
  }

  absl::StatusOr<std::vector<PackTask>> Plan() override {
    std::vector<PackTask> tasks;
    for (size_t rank = 0; rank < 2; ++rank) {
      const WeightLayout& layout = *layouts_[rank];
      for (int block = 0; block < layout.num_blocks(); ++block) {
        const size_t bytes = layout.BlockBytes(block) + 256 * rank;
        blocks_.push_back(AllocateAligned(bytes));
        sizes_.push_back(bytes);
        tasks.push_back({.layout = &layout,
                         .block = block,
                         .bytes = bytes,
                         .rank = rank,
                         .place = rank == 0 ? blocks_.back().get() : nullptr});
      }
    }
    return tasks;
  }
  absl::Status Put(const PackTask& task, const std::byte* packed) override {
    EXPECT_EQ(task.rank, 1u);
    const auto first = static_cast<size_t>(layouts_[0]->num_blocks());
    std::memcpy(blocks_[first + static_cast<size_t>(task.block)].get(), packed, task.bytes);
    return absl::OkStatus();
  }

  // The bytes of all blocks, and zeros behind those of the second rank.
  std::vector<std::string> Digests() const {
    std::vector<std::string> digests;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      digests.push_back(Sha256Hex(blocks_[i].get(), sizes_[i]));
    }
    return digests;
  }
  const WeightLayout& layout() const { return *layouts_[0]; }

 private:
  std::vector<std::unique_ptr<WeightLayout>> layouts_;
  std::vector<AlignedBytes> blocks_;
  std::vector<size_t> sizes_;
};

ModelPlan PlanOf(const std::string& shape) { return ModelPlan(*NamedModelShape(shape)); }

std::vector<std::string> Pack(const TensorSource& source, const ModelPlan& plan) {
  HostStore store(plan);
  ISOBIT_EXPECT_OK(PackModel(source, "", store));
  return store.Digests();
}

// What serial packing gives.
TEST(PackModelTest, GivesTheBytesAndZerosBehindThem) {
  const ModelPlan plan = PlanOf("tiny-qwen2");
  const DrawnWeights source(plan);
  HostStore store(plan);
  ISOBIT_ASSERT_OK(PackModel(source, "", store));
  WeightReader reader(source);
  std::vector<std::string> names;
  for (const Tensor& tensor : source.tensors()) names.push_back(tensor.name);
  TensorSet tensors;
  ISOBIT_ASSERT_OK(reader.Read(names, 1, tensors));
  std::vector<std::string> expected;
  for (int rank = 0; rank < 2; ++rank) {
    const WeightLayout layout(plan, *ShapeOfRank(plan.config, rank, 2), Packer());
    for (int block = 0; block < layout.num_blocks(); ++block) {
      const size_t used = layout.BlockBytes(block);
      const size_t bytes = used + 256 * static_cast<size_t>(rank);
      const AlignedBytes memory = AllocateAligned(bytes);
      std::memset(memory.get(), 0, bytes);
      layout.PackBlock(tensors, block, memory.get());
      expected.push_back(Sha256Hex(memory.get(), bytes));
    }
  }
  EXPECT_EQ(store.Digests(), expected);
}

// A tied head needs the embedding's tensor, which is read once. This follows from the plan, not
// from the config: in a plan where two layers share a matrix, these layers are packed together as
// well.
TEST(PackModelTest, BlocksThatShareTensorsArePackedTogether) {
  ModelPlan plan = PlanOf("tiny-qwen2");
  const auto tensors_of = [&](size_t block, const char* name) -> std::vector<TensorSpec>& {
    auto& parameters = plan.parameters[block];
    return std::ranges::find(parameters, name, &Parameter::name)->tensors;
  };
  plan.config.tie_word_embeddings = false;  // does not change the table
  tensors_of(plan.parameters.size() - 1, "head") = tensors_of(0, "embedding");
  tensors_of(4, "down") = tensors_of(2, "down");
  plan.tied.clear();
  const SentSource source(
      plan,
      [&] {
        std::vector<size_t> order(DrawnWeights(plan).tensors().size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        return order;
      }(),
      SIZE_MAX);  // fails if a byte is read twice
  EXPECT_EQ(Pack(source, plan), Pack(DrawnWeights(plan), plan));
}

TEST(PackModelTest, TensorsMayArriveInPiecesAndInAnyOrder) {
  const ModelPlan plan = PlanOf("tiny-qwen2");
  const DrawnWeights there(plan);
  const std::vector<std::string> expected = Pack(there, plan);
  size_t layer_bytes = 0;
  for (const Tensor& tensor : there.tensors()) {
    if (tensor.name.find("layers.0.") != std::string::npos) layer_bytes += tensor.size_bytes;
  }
  // Blocks from the last to the first, in any order within a block. So little is kept that the
  // pass must ask in that order.
  const WeightLayout layout(plan, *ShapeOfRank(plan.config, 0, 1), Packer());
  std::vector<size_t> order;
  std::mt19937 random(1);
  for (int block = layout.num_blocks() - 1; block >= 0; --block) {
    std::vector<size_t> tensors;
    for (const std::string& name : layout.TensorsOf(block)) {
      const auto tensor = static_cast<size_t>(there.Find(name) - there.tensors().data());
      if (std::ranges::find(order, tensor) == order.end()) tensors.push_back(tensor);
    }
    std::shuffle(tensors.begin(), tensors.end(), random);
    order.insert(order.end(), tensors.begin(), tensors.end());
  }
  const SentSource source(plan, order, layer_bytes);
  EXPECT_EQ(Pack(source, plan), expected);
}

TEST(PackModelTest, ASenderThatHasGoneIsAnError) {
  const ModelPlan plan = PlanOf("tiny-qwen2");
  std::vector<size_t> order(DrawnWeights(plan).tensors().size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const SentSource source(plan, order, SIZE_MAX, order.size() - 1);
  HostStore store(plan);
  EXPECT_THAT(PackModel(source, "", store), StatusIs(absl::StatusCode::kDataLoss));
}

}  // namespace
}  // namespace isobit
