// The folder of a run: what comes back, what goes, and that a process killed at any moment leaves
// one that can be opened.
#include "trainer_bridge/trainer/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit::trainer {
namespace {

namespace fs = std::filesystem;

using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;

class RunFolderTest : public testing::Test {
 protected:
  RunFolder Open(bool resume) {
    auto folder = RunFolder::Open(path_, recipe_, resume);
    EXPECT_THAT(folder, testing_support::IsOk());
    return *std::move(folder);
  }

  // A state of one tensor, whose values are those of `step`.
  std::vector<Tensor> StateOf(int step) {
    values_.assign(6, static_cast<float>(step) + 0.5f);
    Tensor tensor;
    tensor.name = "master.w";
    tensor.dtype = DType::kF32;
    tensor.shape = {2, 3};
    tensor.data = reinterpret_cast<const uint8_t*>(values_.data());
    tensor.size_bytes = values_.size() * sizeof(float);
    return {tensor};
  }

  // Steps `first` to `last`, each with a checkpoint.
  void Run(RunFolder& folder, int first, int last) {
    for (int step = first; step <= last; ++step) {
      ISOBIT_ASSERT_OK(folder.Add(step, {{"reward", step / 10.0}}));
      ISOBIT_ASSERT_OK(folder.Save(step, "digest of " + std::to_string(step), StateOf(step)));
    }
  }

  std::string Metrics() const {
    std::ostringstream text;
    text << std::ifstream(path_ + "/metrics.jsonl").rdbuf();
    return text.str();
  }

  // The step of the latest checkpoint, whose values it checks; 0: none.
  int64_t LoadedStep(RunFolder& folder) {
    auto saved = folder.Load();
    EXPECT_THAT(saved, testing_support::IsOk());
    if (!saved.ok() || !*saved) return 0;
    EXPECT_EQ((*saved)->weights_digest, "digest of " + std::to_string((*saved)->step));
    EXPECT_EQ((*saved)->state.size(), 1);
    const Tensor& tensor = (*saved)->state[0];
    EXPECT_EQ(tensor.name, "master.w");
    EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
    std::vector<float> values(tensor.NumElements());
    tensor.ToFloat(values.data());
    EXPECT_THAT(values, testing::Each(static_cast<float>((*saved)->step) + 0.5f));
    return (*saved)->step;
  }

  TempDir scratch_;
  const std::string path_ = scratch_.File("runs/first");
  nlohmann::json recipe_ = {{"seed", 1}, {"lr", 0.1}};
  std::vector<float> values_;
};

TEST_F(RunFolderTest, KeepsTwoCheckpointsAndGoesOnFromTheLatest) {
  RunFolder folder = Open(false);
  EXPECT_EQ(LoadedStep(folder), 0);
  Run(folder, 1, 4);
  RunFolder again = Open(true);
  EXPECT_EQ(LoadedStep(again), 4);
  EXPECT_FALSE(fs::exists(path_ + "/checkpoints/step-00000002"));
  EXPECT_TRUE(fs::exists(path_ + "/checkpoints/step-00000003"));
  EXPECT_EQ(Metrics(),
            "{\"step\":1,\"reward\":0.1}\n{\"step\":2,\"reward\":0.2}\n"
            "{\"step\":3,\"reward\":0.3}\n{\"step\":4,\"reward\":0.4}\n");
}

TEST_F(RunFolderTest, NothingIsSavedBeforeTheFirstStep) {
  RunFolder folder = Open(false);
  ISOBIT_ASSERT_OK(folder.Save(0, "digest", StateOf(0)));
  EXPECT_FALSE(fs::exists(path_ + "/checkpoints"));
}

// INVARIANT: what was written but not finished does not count.
TEST_F(RunFolderTest, IsWholeAfterAKill) {
  RunFolder folder = Open(false);
  Run(folder, 1, 2);
  ISOBIT_ASSERT_OK(folder.Add(3, {{"reward", 0.3}}));
  std::ofstream(path_ + "/metrics.jsonl", std::ios::app) << "{\"step\":4,\"rew";
  fs::create_directories(path_ + "/checkpoints/step-00000003.partial");
  std::ofstream(path_ + "/checkpoints/step-00000003.partial/state.safetensors") << "part";
  RunFolder again = Open(true);
  EXPECT_EQ(LoadedStep(again), 2);
  EXPECT_EQ(Metrics(), "{\"step\":1,\"reward\":0.1}\n{\"step\":2,\"reward\":0.2}\n");
  Run(again, 3, 3);
  EXPECT_EQ(LoadedStep(again), 3);
  EXPECT_FALSE(fs::exists(path_ + "/checkpoints/step-00000003.partial"));
}

TEST_F(RunFolderTest, RefusesAnotherRun) {
  Open(false);
  EXPECT_THAT(RunFolder::Open(path_, recipe_, false),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("holds a run: --resume")));
  recipe_ = {{"seed", 2}, {"clip", 0.5}, {"lr", 0.1}};
  EXPECT_THAT(RunFolder::Open(path_, recipe_, true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("holds another run: clip was not set and is 0.5, seed was 1 and "
                                 "is 2")));
}

TEST_F(RunFolderTest, NamesAFileThatIsNotWhatWasWritten) {
  RunFolder folder = Open(false);
  Run(folder, 1, 1);
  const std::string state = path_ + "/checkpoints/step-00000001/state.safetensors";
  fs::resize_file(state, fs::file_size(state) - 1);
  EXPECT_THAT(folder.Load(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("state.safetensors")));
}

TEST_F(RunFolderTest, CopiesAModelsTexts) {
  for (const char* name : {"config.json", "chat.jinja", "model.safetensors.index.json", "a.bin"}) {
    scratch_.Write(name, "text");
  }
  fs::create_directories(path_);
  ISOBIT_ASSERT_OK(CopyModelTexts(scratch_.path(), path_));
  EXPECT_TRUE(fs::exists(path_ + "/config.json"));
  EXPECT_TRUE(fs::exists(path_ + "/chat.jinja"));
  EXPECT_FALSE(fs::exists(path_ + "/model.safetensors.index.json"));
  EXPECT_FALSE(fs::exists(path_ + "/a.bin"));
  EXPECT_THAT(CopyModelTexts(scratch_.File("none"), path_),
              StatusIs(absl::StatusCode::kUnknown, HasSubstr("No such file")));
}

}  // namespace
}  // namespace isobit::trainer
