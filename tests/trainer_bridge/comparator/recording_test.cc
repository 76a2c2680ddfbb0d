// Recording: numbers as Python writes them, full files, and samples that cannot be written are
// counted. That `isobit audit` reads the lines is tested in tests/e2e/audit_test.py.
#include "trainer_bridge/comparator/recording.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/metric_value.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "trainer_bridge/comparator/recording_line.h"

namespace isobit {
namespace {

using testing_support::MetricValue;
using testing_support::StatusIs;

v1::TappedSample Sample(uint32_t token) {
  v1::TappedSample sample;
  sample.set_request_id("r");
  sample.add_prompt_token_ids(7);
  sample.mutable_tokens()->add_token_ids(token);
  sample.mutable_tokens()->add_logprobs(-1.5f);
  sample.mutable_tokens()->add_weight_versions(1);
  sample.mutable_sampling()->set_temperature(0.8f);
  sample.mutable_complete()->set_logprob_mode(v1::LOGPROB_MODE_PROCESSED);
  sample.mutable_complete()->set_finish_reason(v1::FINISH_REASON_LENGTH);
  return sample;
}

class RecordingTest : public testing::Test {
 protected:
  std::unique_ptr<Recording> Open(const RecordingOptions& options) {
    absl::StatusOr<std::unique_ptr<Recording>> recording = Recording::Open(options, counts_);
    EXPECT_THAT(recording, testing_support::IsOk());
    return *std::move(recording);
  }
  double Count(const std::string& outcome) {
    return MetricValue(metrics_, "isobit_recorded_samples_total", {{"outcome", outcome}});
  }
  std::vector<uint32_t> TokensIn(const std::string& path) {
    std::vector<uint32_t> tokens;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains("tokens")) tokens.push_back(json["tokens"][0]);
    }
    return tokens;
  }
  // Of the last line; null: it is no seal.
  static nlohmann::json SealOf(const std::string& path) {
    std::ifstream file(path);
    std::string last;
    for (std::string line; std::getline(file, line);) last = line;
    return last.empty() ? nlohmann::json()
                        : nlohmann::json::parse(last).value("samples", nlohmann::json());
  }

  const testing_support::TempDir dir_;
  const std::string path_ = dir_.File("run.jsonl");
  Metrics metrics_;
  const RecordingMetrics counts_{metrics_};
};

TEST(JsonNumberTest, WritesAsPython) {
  // Of Python's json.dumps(float(numpy.format_float_positional(...))) of the same fp32 numbers.
  const std::vector<std::pair<float, std::string>> cases = {{0.0f, "0.0"},
                                                            {-0.0f, "-0.0"},
                                                            {1.0f, "1.0"},
                                                            {0.8f, "0.8"},
                                                            {1000.0f, "1000.0"},
                                                            {-2.0f, "-2.0"},
                                                            {1.2345679f, "1.2345679"},
                                                            {0.0001f, "0.0001"},
                                                            {1e-5f, "1e-05"},
                                                            {1.5e-6f, "1.5e-06"},
                                                            {123.25f, "123.25"},
                                                            {1e15f, "1000000000000000.0"},
                                                            {1e16f, "1e+16"},
                                                            {1.25e20f, "1.25e+20"},
                                                            {3.4028235e38f, "3.4028235e+38"},
                                                            {1e-45f, "1e-45"}};
  for (const auto& [value, text] : cases) EXPECT_EQ(JsonNumber(value), text);
}

TEST_F(RecordingTest, LinesAreChained) {
  const RecordingLine first = MakeRecordingLine(Sample(1), 5, "");
  const RecordingLine second = MakeRecordingLine(Sample(1), 5, first.sum);
  EXPECT_NE(first.sum, second.sum);
  const auto json = nlohmann::json::parse(first.text);
  EXPECT_EQ(json["sum"], first.sum);
  EXPECT_EQ(json["logprobs"], "bfc00000");
  EXPECT_EQ(json["sampling"].dump(), R"({"temperature":0.8})");
  EXPECT_EQ(json["finish_reason"], "length");
  EXPECT_EQ(json["logprob_mode"], "processed");
}

TEST_F(RecordingTest, FullFilesAreKeptAndTheOldestIsDeleted) {
  std::ofstream(path_) << "of the last run\n";
  const size_t line = MakeRecordingLine(Sample(0), 1'700'000'000, "").text.size();
  {
    const auto recording =
        Open({.path = path_, .max_file_bytes = 2 * line - 2, .max_old_files = 2});
    for (uint32_t token = 0; token < 7; ++token) recording->Add(Sample(token));
  }
  EXPECT_EQ(Count("written"), 7);
  EXPECT_EQ(TokensIn(path_), std::vector<uint32_t>({6}));
  EXPECT_EQ(TokensIn(path_ + ".1"), std::vector<uint32_t>({4, 5}));
  EXPECT_EQ(TokensIn(path_ + ".2"), std::vector<uint32_t>({2, 3}));
  EXPECT_EQ(SealOf(path_), 1) << "sealed at the end";
  EXPECT_EQ(SealOf(path_ + ".1"), 2) << "sealed when it was full";
  EXPECT_EQ(SealOf(path_ + ".2"), 2);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".3"));
}

TEST_F(RecordingTest, TheSealIsChainedToTheLastLine) {
  { Open({.path = path_})->Add(Sample(1)); }
  std::ifstream file(path_);
  std::string line, seal;
  ASSERT_TRUE(std::getline(file, line) && std::getline(file, seal));
  EXPECT_EQ(seal + "\n", MakeRecordingSeal(1, nlohmann::json::parse(line)["sum"]).text);
  EXPECT_EQ(nlohmann::json::parse(seal)["samples"], 1);
}

TEST_F(RecordingTest, TheEndSealsTheFileThoughOthersHoldTheRecording) {
  const auto recording = Open({.path = path_});
  recording->Add(Sample(1));
  recording->End();
  EXPECT_EQ(SealOf(path_), 1);
  recording->Add(Sample(2));
  EXPECT_EQ(Count("dropped"), 1);
  EXPECT_EQ(TokensIn(path_), std::vector<uint32_t>({1}));
}

TEST_F(RecordingTest, AFileThatSomebodyRecordsToIsRefused) {
  {
    const auto first = Open({.path = path_});
    first->Add(Sample(1));
    EXPECT_THAT(Recording::Open({.path = path_}, counts_).status(),
                StatusIs(absl::StatusCode::kFailedPrecondition, testing::HasSubstr(path_)));
    first->Add(Sample(2));
  }
  EXPECT_EQ(TokensIn(path_), std::vector<uint32_t>({1, 2}));
  EXPECT_EQ(SealOf(path_), 2);
  Open({.path = path_})->Add(Sample(3));
  EXPECT_EQ(TokensIn(path_ + ".1"), std::vector<uint32_t>({1, 2}));
}

TEST_F(RecordingTest, WhatIsNotWrittenIsCounted) {
  {
    const auto recording = Open({.path = path_, .max_queued_bytes = 0});
    for (int i = 0; i < 3; ++i) recording->Add(Sample(1));
    EXPECT_EQ(Count("dropped"), 3);
    v1::TappedSample mixed = Sample(1);
    mixed.mutable_tokens()->MergeFrom(Sample(2).tokens());
    mixed.mutable_tokens()->set_weight_versions(1, 2);
    recording->Add(mixed);
    recording->Add(v1::TappedSample());
    EXPECT_EQ(Count("skipped"), 2);
  }
  EXPECT_TRUE(TokensIn(path_).empty());
  {
    const testing_support::FileSizeLimit full_disk(0);
    const auto full = Open({.path = path_});
    full->Add(Sample(1));
    full->Add(Sample(2));
  }
  EXPECT_EQ(Count("failed"), 2);
  EXPECT_EQ(Count("written"), 0);
}

TEST_F(RecordingTest, SaysWhatCannotBeOpened) {
  EXPECT_THAT(Recording::Open({.path = dir_.File("missing/run.jsonl")}, counts_).status(),
              StatusIs(absl::StatusCode::kNotFound, testing::HasSubstr("missing/run.jsonl")));
}

TEST_F(RecordingTest, FilesAreTheirOwnersAlone) {
  const auto mode = [](const std::string& path) {
    struct stat info = {};
    EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
    return info.st_mode & 07777;
  };
  for (const char* text : {"", "an earlier run\n"}) {
    dir_.Write("run.jsonl", text);
    ASSERT_EQ(chmod(path_.c_str(), 0644), 0);
    std::ifstream opened_before(path_);
    Open({.path = path_})->Add(Sample(5));
    EXPECT_EQ(mode(path_), 0600u);
    EXPECT_EQ(TokensIn(path_), std::vector<uint32_t>{5});
    const std::string seen((std::istreambuf_iterator<char>(opened_before)), {});
    EXPECT_EQ(seen, text) << "who has opened it before reads nothing new";
  }
  EXPECT_EQ(mode(path_ + ".1"), 0600u);
}

TEST_F(RecordingTest, WhatIsNoRegularFileIsRefusedAtOnce) {
  const std::string elsewhere = dir_.Write("elsewhere", "");
  ASSERT_EQ(symlink(elsewhere.c_str(), path_.c_str()), 0);
  const auto error = [&] { return Recording::Open({.path = path_}, counts_).status(); };
  EXPECT_THAT(error(), StatusIs(absl::StatusCode::kInvalidArgument,
                                testing::HasSubstr("got a symbolic link")));
  ASSERT_EQ(unlink(path_.c_str()), 0);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(error(), StatusIs(absl::StatusCode::kInvalidArgument,
                                testing::HasSubstr("expected a regular file")));
}

}  // namespace
}  // namespace isobit
