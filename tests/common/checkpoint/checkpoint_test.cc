// Whole checkpoints: shards and their index, containment, and digests.
#include "common/checkpoint/checkpoint.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/checkpoint/raw_safetensors.h"
#include "tests/support/all_tensors.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;

constexpr char kIndex[] = "model.safetensors.index.json";

TEST(CheckpointTest, OpensOneFile) {
  const TempDir dir;
  dir.Write("model.safetensors", RawSafetensors("w", 3));
  ISOBIT_ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(dir.path()));
  const Checkpoint moved = std::move(checkpoint);  // the files stay open
  ASSERT_NE(moved.Find("w"), nullptr);
  EXPECT_EQ(testing_support::AllTensors(moved).Find("w")->data[5], 0);
  EXPECT_EQ(moved.Find("v"), nullptr);
  EXPECT_EQ(moved.Find("x"), nullptr);
}

TEST(CheckpointTest, OpensShardsWithTheDigestOfTheWhole) {
  const TempDir sharded;
  const TempDir single;
  const std::string bytes = "0123";
  const Tensor a = {"a", DType::kBf16, {2}, reinterpret_cast<const uint8_t*>(bytes.data()), 4};
  const Tensor b = {"b", DType::kF32, {1}, reinterpret_cast<const uint8_t*>(bytes.data()), 4};
  ISOBIT_ASSERT_OK(WriteSafetensors(sharded.File("1.safetensors"), {b}));
  ISOBIT_ASSERT_OK(WriteSafetensors(sharded.File("2.safetensors"), {a}));
  ISOBIT_ASSERT_OK(
      WriteSafetensorsIndex(sharded.path(), {{"b", "1.safetensors"}, {"a", "2.safetensors"}}, 8));
  ISOBIT_ASSERT_OK(WriteSafetensors(single.File("model.safetensors"), {a, b}));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint two, Checkpoint::Open(sharded.path()));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint one, Checkpoint::Open(single.path()));
  ASSERT_EQ(two.tensors().size(), 2u);
  EXPECT_EQ(two.tensors()[0].name, "a");
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests of_two, DigestTensors(two));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests of_one, DigestTensors(one));
  EXPECT_EQ(of_two.checkpoint, of_one.checkpoint);
  EXPECT_EQ(of_two.tensors.at("b").digest, TensorDigest(b));

  const std::string flipped = "0122";
  const Tensor other = {
      "a", DType::kBf16, {2}, reinterpret_cast<const uint8_t*>(flipped.data()), 4};
  const TempDir changed;
  ISOBIT_ASSERT_OK(WriteSafetensors(changed.File("model.safetensors"), {other, b}));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint bad, Checkpoint::Open(changed.path()));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const CheckpointDigests of_bad, DigestTensors(bad));
  EXPECT_NE(of_bad.checkpoint, of_one.checkpoint);
}

TEST(CheckpointTest, EachBrokenDirectoryHasItsMessage) {
  const struct {
    const char* what;
    std::vector<std::pair<std::string, std::string>> files;
    absl::StatusCode code;
    const char* message;
  } kCases[] = {
      {"nothing", {}, absl::StatusCode::kNotFound, "has neither model.safetensors nor"},
      {"both",
       {{"model.safetensors", RawSafetensors("w", 1)}, {kIndex, "{}"}},
       absl::StatusCode::kInvalidArgument,
       "has both"},
      {"index is no JSON", {{kIndex, "{"}}, absl::StatusCode::kInvalidArgument, "not valid JSON"},
      {"no weight_map", {{kIndex, "{}"}}, absl::StatusCode::kInvalidArgument, "weight_map must be"},
      {"mistyped shard",
       {{kIndex, R"({"weight_map":{"w":1}})"}},
       absl::StatusCode::kInvalidArgument,
       R"(the shard of tensor "w" must be a file name)"},
      {"missing shard",
       {{kIndex, R"({"weight_map":{"w":"a"}})"}},
       absl::StatusCode::kNotFound,
       R"(file "a" of)"},
      {"path upwards",
       {{kIndex, R"({"weight_map":{"w":"../a"}})"}},
       absl::StatusCode::kInvalidArgument,
       "is not a plain file name"},
      {"absolute path",
       {{kIndex, R"({"weight_map":{"w":"/etc/passwd"}})"}},
       absl::StatusCode::kInvalidArgument,
       "is not a plain file name"},
      {"dots",
       {{kIndex, R"({"weight_map":{"w":".."}})"}},
       absl::StatusCode::kInvalidArgument,
       "is not a plain file name"},
      {"NUL byte",
       {{kIndex, R"({"weight_map":{"w":"a\u0000b"}})"}},
       absl::StatusCode::kInvalidArgument,
       "is not a plain file name"},
      {"tensor missing in its shard",
       {{kIndex, R"({"weight_map":{"w":"a","v":"a"}})"}, {"a", RawSafetensors("w", 1)}},
       absl::StatusCode::kInvalidArgument,
       R"(tensor "v" is missing in its shard "a")"},
      {"tensor in another shard",
       {{kIndex, R"({"weight_map":{"w":"b","v":"a"}})"},
        {"a", RawSafetensors("w", 1)},
        {"b", RawSafetensors("v", 1)}},
       absl::StatusCode::kInvalidArgument,
       R"(is missing in its shard)"},
      {"tensor the index does not list",
       {{kIndex, R"({"weight_map":{"w":"a"}})"},
        {"a", RawSafetensors(R"({"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
                             R"("x":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}})",
                             "0123")}},
       absl::StatusCode::kInvalidArgument,
       R"(tensor "x" of shard "a" is not listed)"},
      {"tensor in two shards",
       {{kIndex, R"({"weight_map":{"w":"a","v":"b"}})"},
        {"a", RawSafetensors("w", 1)},
        {"b", RawSafetensors("w", 1)}},
       absl::StatusCode::kInvalidArgument,
       R"(b: tensor "w" is also in a)"},
      {"truncated shard",
       {{kIndex, R"({"weight_map":{"w":"a"}})"}, {"a", RawSafetensors("w", 9).substr(0, 80)}},
       absl::StatusCode::kInvalidArgument,
       R"(a: tensor "w": ends at byte 18)"},
  };
  for (const auto& test : kCases) {
    const TempDir dir;
    for (const auto& [name, contents] : test.files) dir.Write(name, contents);
    EXPECT_THAT(Checkpoint::Open(dir.path()), StatusIs(test.code, HasSubstr(test.message)))
        << test.what;
  }
}

TEST(CheckpointTest, SymlinksMustEndInsideTheRoot) {
  const TempDir root;
  const std::string snapshot = root.File("snapshot");
  std::filesystem::create_directory(snapshot);
  root.Write("blob", RawSafetensors("w", 1));
  std::filesystem::create_symlink("../blob", snapshot + "/model.safetensors");
  EXPECT_THAT(Checkpoint::Open(snapshot),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("leads outside")));
  ISOBIT_EXPECT_OK(Checkpoint::Open(snapshot, root.path()));
}

TEST(CheckpointTest, RefusesWhatIsNoRegularFile) {
  const TempDir dir;
  ASSERT_EQ(mkfifo(dir.File("model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(Checkpoint::Open(dir.path()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  const TempDir dangling;
  std::filesystem::create_symlink("nowhere", dangling.File("model.safetensors"));
  EXPECT_THAT(Checkpoint::Open(dangling.path()), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace isobit
