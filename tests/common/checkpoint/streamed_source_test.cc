// Weights that arrive in pieces: every byte exactly once, in any order, within a bound, without a
// deadlock; and what a sender can do wrong.
#include "common/checkpoint/streamed_source.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/parallel_for.h"
#include "common/checkpoint/weight_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr std::chrono::milliseconds kNever(20'000);  // a deadlock, in a test

struct Piece {
  uint64_t tensor;
  uint64_t offset;
  std::string bytes;
};

class StreamedSourceTest : public testing::Test {
 protected:
  StreamedSourceTest() {
    for (const ExpectedTensor& spec : ExpectedTensors(ModelPlan(config_))) {
      listed_.push_back({.name = spec.name, .dtype = DType::kBf16, .shape = spec.shape});
      const std::vector<uint16_t>& values = weights_.tensors.at(spec.name);
      bytes_.emplace_back(reinterpret_cast<const char*>(values.data()), 2 * values.size());
    }
  }

  std::shared_ptr<StreamedSource> Open(size_t max_kept_bytes = SIZE_MAX,
                                       std::chrono::milliseconds max_silence = kNever) const {
    auto source = StreamedSource::Create(
        listed_, plan_, {}, {.max_kept_bytes = max_kept_bytes, .max_silence = max_silence});
    EXPECT_THAT(source, testing_support::IsOk());
    return *source;
  }

  absl::Status CreateStatus() const {
    return StreamedSource::Create(listed_, plan_, {}, {}).status();
  }

  // All bytes, in the order of the list, cut at random.
  std::vector<Piece> Pieces(std::mt19937& random, size_t longest) const {
    std::vector<Piece> pieces;
    for (size_t tensor = 0; tensor < bytes_.size(); ++tensor) {
      for (size_t at = 0; at < bytes_[tensor].size();) {
        const size_t size = std::min(1 + random() % longest, bytes_[tensor].size() - at);
        pieces.push_back({tensor, at, bytes_[tensor].substr(at, size)});
        at += size;
      }
    }
    return pieces;
  }

  size_t NumberOf(const std::string& name) const {
    return static_cast<size_t>(std::ranges::find(listed_, name, &Tensor::name) - listed_.begin());
  }

  const ModelConfig config_ = testing_support::TinyConfig(Architecture::kQwen3);
  const ModelPlan plan_{config_};
  const testing_support::TinyWeights weights_ = testing_support::RandomWeights(config_, 1);
  std::vector<Tensor> listed_;      // in the order of a forward pass
  std::vector<std::string> bytes_;  // [number]
};

// Sends pieces on threads of its own, each when the source wants one, as the wire does.
class Sender {
 public:
  Sender(std::shared_ptr<StreamedSource> source, std::vector<Piece> pieces)
      : source_(std::move(source)), pieces_(std::move(pieces)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~Sender() { thread_.join(); }

  size_t num_sent() const { return num_sent_; }

 private:
  void Run() {
    for (Piece& piece : pieces_) {
      const auto wanted = std::make_shared<std::promise<void>>();
      source_->WhenWanted([wanted] { wanted->set_value(); });
      if (wanted->get_future().wait_for(kNever) != std::future_status::ready) {
        ADD_FAILURE() << "nobody wants piece " << num_sent_;
        source_->Fail(absl::InternalError("deadlock"));
        return;
      }
      if (!source_->Add(piece.tensor, piece.offset, std::move(piece.bytes)).ok()) return;
      ++num_sent_;
    }
    ISOBIT_EXPECT_OK(source_->End("what the sender thinks"));
  }

  const std::shared_ptr<StreamedSource> source_;
  std::vector<Piece> pieces_;
  std::atomic<size_t> num_sent_ = 0;
  std::thread thread_;
};

TEST_F(StreamedSourceTest, AnyOrderFitsAnyBound) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    std::vector<Piece> pieces = Pieces(random, round % 3 == 0 ? 300 : 5000);
    if (round % 2 == 0) std::ranges::shuffle(pieces, random);
    const size_t bound = std::vector<size_t>{0, 1000, 20'000, SIZE_MAX}[random() % 4];
    const std::shared_ptr<StreamedSource> source = Open(bound);
    const Sender sender(source, std::move(pieces));
    std::vector<std::vector<std::string>> groups(1 + random() % 4);
    for (const Tensor& tensor : listed_) groups[random() % groups.size()].push_back(tensor.name);
    WeightReader reader(*source);
    std::vector<TensorSet> sets(groups.size());
    const absl::Status read = ParallelFor(groups.size(), groups.size(), [&](size_t i, size_t) {
      return reader.Read(groups[i], 2, sets[i]);
    });
    ISOBIT_ASSERT_OK(read);
    ISOBIT_ASSERT_OK(reader.Finish());
    EXPECT_EQ(source->expected_digest(), "what the sender thinks");
    for (size_t i = 0; i < groups.size(); ++i) {
      for (const std::string& name : groups[i]) {
        const Tensor& tensor = *sets[i].Find(name);
        const std::string& expected = bytes_[NumberOf(name)];
        ASSERT_EQ(tensor.size_bytes, expected.size());
        EXPECT_EQ(std::memcmp(tensor.data, expected.data(), expected.size()), 0) << name;
      }
    }
  }
}

TEST_F(StreamedSourceTest, KeepsLittleOfWhatNobodyAsksFor) {
  std::mt19937 random(1);
  const std::shared_ptr<StreamedSource> source = Open(/*max_kept_bytes=*/3000);
  std::vector<Piece> pieces = Pieces(random, 400);
  const size_t num_pieces = pieces.size();
  const Sender sender(source, std::move(pieces));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(sender.num_sent(), 0u) << "nobody has read anything yet";
  // One element of the first tensor: the sender sends on to its bound, and no further.
  uint8_t element[2];
  const size_t first =
      static_cast<size_t>(source->Find(listed_[0].name) - source->tensors().data());
  ISOBIT_ASSERT_OK(source->Read(first, 0, 2, element));
  while (sender.num_sent() < 3000 / (400 + 128)) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LT(sender.num_sent(), 25u);
  EXPECT_EQ(std::memcmp(element, bytes_[0].data(), 2), 0);
  // A reader that waits for the last tensor gets it, although what comes before is kept.
  const Tensor& last = *source->Find(listed_.back().name);
  std::vector<uint8_t> end(last.size_bytes);
  ISOBIT_ASSERT_OK(source->Read(static_cast<size_t>(&last - source->tensors().data()), 0,
                                last.size_bytes, end.data()));
  EXPECT_EQ(std::memcmp(end.data(), bytes_.back().data(), end.size()), 0);
  ISOBIT_EXPECT_OK(source->CheckUnchanged());
  EXPECT_EQ(sender.num_sent(), num_pieces);
}

TEST_F(StreamedSourceTest, ArrivalIsTheOrderOfTheList) {
  std::ranges::reverse(listed_);
  const std::shared_ptr<StreamedSource> source = Open();
  for (size_t i = 0; i < source->tensors().size(); ++i) {
    EXPECT_EQ(listed_[source->ArrivalOf(i)].name, source->tensors()[i].name);
  }
}

TEST_F(StreamedSourceTest, EachByteComesOnce) {
  const size_t norm = NumberOf("model.norm.weight");
  const size_t size = bytes_[norm].size();
  const struct {
    uint64_t offset;
    size_t bytes;
    const char* message;
  } kCases[] = {{0, size, "have come before"},         {10, 10, "have come before"},
                {0, 11, "have come before"},           {19, 5, "have come before"},
                {12, 2, "have come before"},           {size - 1, 2, "the tensor has"},
                {size, 1, "the tensor has"},           {UINT64_MAX, 2, "the tensor has"},
                {UINT64_MAX - 1, 2, "the tensor has"}, {0, 0, "at least one"}};
  for (const auto& one : kCases) {
    const std::shared_ptr<StreamedSource> source = Open();
    ISOBIT_ASSERT_OK(source->Add(norm, 10, bytes_[norm].substr(10, 10)));
    const auto refused = StatusIs(
        kInvalid, AllOf(HasSubstr("tensor \"model.norm.weight\", "), HasSubstr(one.message)));
    EXPECT_THAT(source->Add(norm, one.offset, std::string(one.bytes, 'x')), refused) << one.offset;
    // The error is everybody's from now on.
    EXPECT_THAT(source->Add(norm, 0, bytes_[norm].substr(0, 10)), refused);
    EXPECT_THAT(source->End(""), refused);
    EXPECT_THAT(source->CheckUnchanged(), refused);
    uint8_t element[2];
    EXPECT_THAT(source->Read(0, 0, 2, element), refused);
  }
  const std::shared_ptr<StreamedSource> source = Open();
  EXPECT_THAT(source->Add(listed_.size(), 0, "xx"),
              StatusIs(kInvalid, HasSubstr("a piece of tensor 25, expected 0 to 24")));
}

TEST_F(StreamedSourceTest, WhatWasReadDoesNotComeAgain) {
  const std::shared_ptr<StreamedSource> source = Open();
  ISOBIT_ASSERT_OK(source->Add(0, 0, bytes_[0].substr(0, 100)));
  std::vector<uint8_t> read(50);
  const size_t first =
      static_cast<size_t>(source->Find(listed_[0].name) - source->tensors().data());
  ISOBIT_ASSERT_OK(source->Read(first, 0, 50, read.data()));
  ISOBIT_ASSERT_OK(source->Read(first, 50, 50, read.data()));
  EXPECT_THAT(source->Add(0, 50, bytes_[0].substr(50, 100)),
              StatusIs(kInvalid, HasSubstr("have come before")));
}

TEST_F(StreamedSourceTest, AnEndWithoutAllBytesNamesTheTensor) {
  std::mt19937 random(1);
  const std::shared_ptr<StreamedSource> source = Open();
  const size_t missing = NumberOf("model.layers.1.mlp.up_proj.weight");
  for (Piece& piece : Pieces(random, SIZE_MAX)) {
    if (piece.tensor == missing) piece.bytes.pop_back();
    ISOBIT_ASSERT_OK(source->Add(piece.tensor, piece.offset, std::move(piece.bytes)));
  }
  EXPECT_THAT(source->End(""), StatusIs(kInvalid, HasSubstr("model.layers.1.mlp.up_proj.weight")));
  EXPECT_THAT(source->CheckUnchanged(), StatusIs(kInvalid, HasSubstr("before the end")));
}

TEST_F(StreamedSourceTest, ASilentSenderIsGivenUp) {
  const std::shared_ptr<StreamedSource> source = Open(SIZE_MAX, std::chrono::milliseconds(50));
  ISOBIT_ASSERT_OK(source->Add(0, 0, bytes_[0].substr(0, 2)));
  std::this_thread::sleep_for(std::chrono::milliseconds(80));  // nobody has read: it may be silent
  const size_t first =
      static_cast<size_t>(source->Find(listed_[0].name) - source->tensors().data());
  uint8_t bytes[4];
  EXPECT_THAT(source->Read(first, 0, 4, bytes),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("silent for 50 ms, expected byte 2 of tensor \"model.embed")));
}

TEST_F(StreamedSourceTest, AFailureEndsAReaderThatWaits) {
  const std::shared_ptr<StreamedSource> source = Open();
  std::thread failing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    source->Fail(absl::CancelledError("the sender has gone"));
    source->Fail(absl::InternalError("a later one"));
  });
  uint8_t bytes[4];
  EXPECT_THAT(source->Read(0, 0, 4, bytes),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("has gone")));
  failing.join();
}

TEST_F(StreamedSourceTest, TensorsThatStayWhereTheyAre) {
  std::reverse(listed_.begin(), listed_.end());  // sorted otherwise than the source's
  WeightBlocks held{.handles = {"handle"}, .blocks = {}};
  for (size_t number = 0; number < listed_.size(); ++number) {
    const std::vector<int64_t>& shape = listed_[number].shape;
    const int64_t columns = shape.size() > 1 ? shape[1] : 1;
    held.blocks.push_back(
        {.tensor = number, .num_rows = shape[0], .num_columns = columns, .row_stride = columns});
  }
  const auto open = [&] { return *StreamedSource::Create(listed_, plan_, {}, {}, held); };
  const auto source = open();
  for (size_t number = 0; number < listed_.size(); ++number) {
    const WeightBlock& block = source->blocks()->blocks[number];
    EXPECT_EQ(source->tensors()[block.tensor].name, listed_[number].name);
  }
  ISOBIT_EXPECT_OK(source->failure());
  auto waits = std::async(std::launch::async, [&] { return source->CheckUnchanged(); });
  ISOBIT_EXPECT_OK(source->End("digest"));
  ISOBIT_EXPECT_OK(waits.get());
  EXPECT_EQ(source->expected_digest(), "digest");

  const auto with_piece = open();
  EXPECT_THAT(with_piece->Add(0, 0, "ab"), StatusIs(kInvalid, HasSubstr("expected no pieces")));
  EXPECT_THAT(with_piece->failure(), StatusIs(kInvalid));

  held.blocks.pop_back();
  EXPECT_THAT(StreamedSource::Create(listed_, plan_, {}, {}, held),
              StatusIs(kInvalid, HasSubstr(listed_.back().name)));
  EXPECT_EQ(Open()->blocks(), nullptr);
}

TEST_F(StreamedSourceTest, TheListMustBeThatOfTheModel) {
  const std::vector<Tensor> good = listed_;
  const size_t norm = NumberOf("model.norm.weight");
  listed_.push_back(good[3]);
  EXPECT_THAT(CreateStatus(),
              StatusIs(kInvalid, AllOf(HasSubstr(good[3].name), HasSubstr("twice"))));
  listed_ = good;
  listed_.erase(listed_.begin() + static_cast<std::ptrdiff_t>(norm));
  EXPECT_THAT(CreateStatus(), StatusIs(kInvalid, HasSubstr("missing tensors: model.norm.weight")));
  listed_ = good;
  listed_.push_back({.name = "bias", .dtype = DType::kBf16, .shape = {1}});
  EXPECT_THAT(CreateStatus(), StatusIs(kInvalid, HasSubstr("unexpected tensors: \"bias\"")));
  listed_ = good;
  listed_[norm].shape = {3};
  EXPECT_THAT(CreateStatus(), StatusIs(kInvalid, HasSubstr("model.norm.weight is [3], expected")));
  listed_[norm].shape = {-1};
  EXPECT_THAT(CreateStatus(), StatusIs(kInvalid, AllOf(HasSubstr("model.norm.weight"),
                                                       HasSubstr("negative dimension"))));
  listed_ = good;
  listed_[norm].dtype = DType::kF16;
  EXPECT_THAT(CreateStatus(), StatusIs(kInvalid, AllOf(HasSubstr("F16"), HasSubstr("model.norm"))));
  ISOBIT_EXPECT_OK(
      StreamedSource::Create(listed_, plan_, {.ignored_fields = {}, .round_fp16 = true}, {}));
  listed_[norm].dtype = DType::kF32;
  ISOBIT_EXPECT_OK(CreateStatus());
}

}  // namespace
}  // namespace isobit
