// What is read while files change: the digest is that of the bytes handed out, and a file that was
// changed is refused, not mapped.
#include "common/checkpoint/weight_reader.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/checkpoint/awaited_source.h"
#include "common/checkpoint/checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::AllTensors;
using testing_support::StatusIs;
using testing_support::TempDir;

constexpr size_t kElements = 1 << 19;  // several of the reader's chunks

// Has other bytes at each read, like a file that is overwritten all the time.
class FickleSource final : public TensorSource {
 public:
  FickleSource() {
    for (const char* name : {"a", "b", "c"}) {
      tensors_.push_back({.name = name,
                          .dtype = DType::kBf16,
                          .shape = {static_cast<int64_t>(kElements)},
                          .size_bytes = 2 * kElements});
    }
  }
  absl::Status Read(size_t /*tensor*/, size_t /*first*/, size_t size, uint8_t* out) const override {
    std::memset(out, ++reads_, size);
    return absl::OkStatus();
  }
  int reads() const { return reads_; }

 private:
  mutable std::atomic<int> reads_ = 0;
};

TEST(WeightReaderTest, TheDigestIsThatOfTheBytesHandedOut) {
  const FickleSource source;
  WeightReader reader(source);
  TensorSet some;
  TensorSet more;
  ISOBIT_ASSERT_OK(reader.Read({"b"}, 1, some));
  ISOBIT_ASSERT_OK(reader.Read({"c", "a"}, 2, more));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests digests, reader.Finish());
  EXPECT_EQ(digests.tensors.at("a").digest, TensorDigest(*more.Find("a")));
  EXPECT_EQ(digests.tensors.at("b").digest, TensorDigest(*some.Find("b")));
  EXPECT_EQ(digests.tensors.at("c").digest, TensorDigest(*more.Find("c")));
  EXPECT_NE(digests.tensors.at("a").digest, digests.tensors.at("b").digest);
  EXPECT_EQ(more.Find("b"), nullptr);
}

// Tensors of these names, all alike.
class NamedSource final : public TensorSource {
 public:
  explicit NamedSource(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      tensors_.push_back({.name = name, .dtype = DType::kBf16, .shape = {4}, .size_bytes = 8});
    }
  }
  absl::Status Read(size_t /*tensor*/, size_t /*first*/, size_t size, uint8_t* out) const override {
    std::memset(out, 1, size);
    return absl::OkStatus();
  }
};

TEST(WeightReaderTest, TheDigestIsThatOfTheNames) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests digests,
                              DigestTensors(NamedSource({"a", "b"})));
  for (const std::vector<std::string>& names :
       std::vector<std::vector<std::string>>{{"a", "c"}, {"a"}}) {
    EXPECT_NE(DigestTensors(NamedSource(names))->checkpoint, digests.checkpoint) << names.back();
  }
}

TEST(WeightReaderTest, ReadingStopsWhenTheCallerHasGone) {
  const FickleSource source;
  const AwaitedSource awaited(source, [&] { return source.reads() == 3; });
  WeightReader reader(awaited);
  TensorSet tensors;
  EXPECT_THAT(reader.Read({"a", "b", "c"}, 1, tensors),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("the caller")));
  EXPECT_EQ(source.reads(), 3) << "in the middle of the first tensor";
  WeightReader rest(awaited);
  EXPECT_THAT(rest.Finish(), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(source.reads(), 3);
}

// A directory with tensors a and b in one file, all of whose bytes are `fill`.
class ChangedFileTest : public testing::Test {
 protected:
  void SetUp() override { Write(1, file_); }

  static void Write(uint8_t fill, const std::string& path) {
    const std::vector<uint8_t> bytes(2 * kElements, fill);
    const Tensor a = {"a", DType::kBf16, {kElements}, bytes.data(), bytes.size()};
    Tensor b = a;
    b.name = "b";
    ISOBIT_ASSERT_OK(WriteSafetensors(path, {a, b}));
  }
  std::string Digest() const { return DigestTensors(*Checkpoint::Open(dir_.path()))->checkpoint; }

  const TempDir dir_;
  const std::string file_ = dir_.File("model.safetensors");
};

TEST_F(ChangedFileTest, ATruncatedFileIsAnErrorThatNamesFileAndTensor) {
  const auto size = std::filesystem::file_size(file_);
  for (const uint64_t left : {size - 1, size / 2, uint64_t{9}, uint64_t{0}}) {
    Write(1, file_);
    ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir_.path()));
    WeightReader reader(checkpoint);
    TensorSet tensors;
    std::filesystem::resize_file(file_, left);
    EXPECT_THAT(reader.Read({"a", "b"}, 2, tensors),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("tensor \""), HasSubstr("model.safetensors ended at"),
                               HasSubstr("changed while it was read"))))
        << left;
  }
}

TEST_F(ChangedFileTest, AFileThatWasOverwrittenOrGrewIsRefused) {
  for (const bool grows : {false, true}) {
    Write(1, file_);
    ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir_.path()));
    WeightReader reader(checkpoint);
    TensorSet tensors;
    ISOBIT_ASSERT_OK(reader.Read({"a"}, 1, tensors));
    const auto modified = std::filesystem::last_write_time(file_);
    std::fstream file(file_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(grows ? 0 : -1, std::ios::end);
    file.put(2);
    file.close();
    // A change of size or of time must suffice alone. File system clocks tick slowly, so the time
    // may stay the same by chance.
    std::filesystem::last_write_time(file_, modified + std::chrono::milliseconds(grows ? 0 : 10));
    EXPECT_THAT(reader.Finish(), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("model.safetensors was changed")))
        << grows;
  }
}

TEST_F(ChangedFileTest, AFileThatIsReplacedIsReadToItsEnd) {
  const std::string digest = Digest();
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir_.path()));
  WeightReader reader(checkpoint);
  TensorSet tensors;
  ISOBIT_ASSERT_OK(reader.Read({"a"}, 1, tensors));
  Write(2, file_);  // by rename
  EXPECT_NE(Digest(), digest);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests digests, reader.Finish());
  EXPECT_EQ(digests.checkpoint, digest);
}

TEST_F(ChangedFileTest, BytesThatWereReadDoNotChange) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir_.path()));
  const TensorSet tensors = AllTensors(checkpoint);
  const std::string digest = TensorDigest(*tensors.Find("a"));
  std::filesystem::resize_file(file_, 0);
  EXPECT_EQ(TensorDigest(*tensors.Find("a")), digest);
}

// INVARIANT: nobody is handed weights that are not finite, unless it asks for them.
TEST(WeightReaderTest, RefusesWhatIsNotFinite) {
  const TempDir dir;
  std::vector<uint16_t> values(kElements, 0x3f80);
  values[kElements - 3] = 0x7fc0;
  const std::vector<uint16_t> good(8, 0x3f80);
  const auto tensor = [](const char* name, std::vector<int64_t> shape, const auto& data) {
    return Tensor{name, DType::kBf16, std::move(shape),
                  reinterpret_cast<const uint8_t*>(data.data()), 2 * data.size()};
  };
  ISOBIT_ASSERT_OK(
      WriteSafetensors(dir.File("model.safetensors"),
                       {tensor("good", {8}, good), tensor("bad", {kElements / 16, 16}, values)}));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir.path()));
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                AllOf(HasSubstr("\"bad\""), HasSubstr("[32767, 13]"),
                                      HasSubstr("--allow_nonfinite_weights")));
  TensorSet set;
  EXPECT_THAT(WeightReader(checkpoint).Read({"bad"}, 1, set), refused);
  ISOBIT_EXPECT_OK(WeightReader(checkpoint).Read({"good"}, 1, set));
  EXPECT_THAT(DigestTensors(checkpoint), refused);
  ISOBIT_EXPECT_OK(DigestTensors(checkpoint, /*allow_nonfinite=*/true));
}

}  // namespace
}  // namespace isobit
