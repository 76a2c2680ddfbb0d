// A step's tables on the device: their contents, also while steps follow each other without a
// pause, and their addresses.
#include "kernels/cuda/common/step_tables/sequences.h"

#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;

class StepTableUploadTest : public testing_support::GpuTest {
 protected:
  static std::vector<int32_t> Read(const int32_t* from, int64_t n) {
    std::vector<int32_t> values(static_cast<size_t>(n));
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
    ISOBIT_CHECK_CUDA(
        cudaMemcpy(values.data(), from, values.size() * sizeof(int32_t), cudaMemcpyDefault));
    return values;
  }
};

TEST_F(StepTableUploadTest, HoldsTheStepAndItsPadding) {
  const std::vector<int32_t> first_pages = {7, 3};
  const std::vector<int32_t> last_pages = {9, 1, 4};
  const std::vector<SequenceRows> sequences = {
      {0, 3, 20, first_pages.data()}, {3, 0, 5, nullptr}, {3, 1, 32, last_pages.data()}};
  StepTableUpload upload;
  ASSERT_TRUE(upload
                  .Upload({11, 12, 13, 14}, sequences, 16,
                          {.num_rows = 6, .num_sequences = 5, .max_rows = 4, .max_positions = 99},
                          nullptr)
                  .ok());
  const DeviceSequences& s = upload.device();
  EXPECT_EQ(s.num_rows, 6);
  EXPECT_EQ(s.num_sequences, 5);
  EXPECT_EQ(s.min_rows, 0);
  EXPECT_EQ(s.max_rows, 4);
  EXPECT_EQ(s.max_positions, 99);
  EXPECT_EQ(Read(upload.ids(), 6), (std::vector<int32_t>{11, 12, 13, 14, 0, 0}));
  EXPECT_EQ(Read(s.first_row, 6), (std::vector<int32_t>{0, 3, 3, 4, 4, 4}));
  EXPECT_EQ(Read(s.sequence_of_row, 6), (std::vector<int32_t>{0, 0, 0, 2, -1, -1}));
  EXPECT_EQ(Read(s.first_position, 3), (std::vector<int32_t>{20, 5, 32}));
  EXPECT_EQ(Read(s.first_page, 3), (std::vector<int32_t>{0, 2, 2}));
  EXPECT_EQ(Read(s.pages, 5), (std::vector<int32_t>{7, 3, 9, 1, 4}));
}

TEST_F(StepTableUploadTest, HoldsWhatSequencesShare) {
  std::vector<int32_t> pages(100);
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<int32_t> others = pages;
  others[64] = 7;  // a page of the third split
  const std::vector<SequenceRows> sequences = {
      {0, 1, 1599, pages.data()}, {1, 1, 1598, others.data()}, {2, 1, 20, pages.data()}};
  StepTableUpload upload;
  for (const Sharing sharing : {Sharing::kAlways, Sharing::kWhereItPays}) {
    ASSERT_TRUE(upload
                    .Upload({}, sequences, 16,
                            {.num_sequences = 4, .sharing = sharing, .kv_heads = 8}, nullptr)
                    .ok());
    const DeviceSequences& s = upload.device();
    EXPECT_EQ(s.shares, sharing == Sharing::kAlways);  // two splits saved are too few
    EXPECT_EQ(Read(s.own_split, 4), (std::vector<int32_t>{2, 2, 0, 0}));
    std::vector<int32_t> groups(16, 0);
    groups[1] = 2;  // sequences 0 and 1 share splits [0, 2)
    groups[3] = 2;
    EXPECT_EQ(Read(reinterpret_cast<const int32_t*>(s.groups), 16), groups);
  }
  ASSERT_TRUE(upload.Upload({}, sequences, 16, {.sharing = Sharing::kNever}, nullptr).ok());
  EXPECT_FALSE(upload.device().shares);
  const std::vector<SequenceRows> many(17, {0, 1, 1599, pages.data()});  // 16 times 3 splits
  for (const int32_t kv_heads : {8, 9}) {
    ASSERT_TRUE(
        upload
            .Upload({}, many, 16, {.sharing = Sharing::kWhereItPays, .kv_heads = kv_heads}, nullptr)
            .ok());
    EXPECT_EQ(upload.device().shares, 48 * kv_heads >= kLeastSavedItems);
  }
}

TEST_F(StepTableUploadTest, BoundsAreTheStepsOwnUnlessGiven) {
  const std::vector<int32_t> pages = {0, 1, 2};
  const std::vector<SequenceRows> sequences = {{0, 2, 0, pages.data()}, {2, 5, 30, pages.data()}};
  StepTableUpload upload;
  ASSERT_TRUE(upload.Upload({}, sequences, 16, {}, nullptr).ok());
  EXPECT_EQ(upload.device().num_rows, 7);
  EXPECT_EQ(upload.device().num_sequences, 2);
  EXPECT_EQ(upload.device().min_rows, 2);
  EXPECT_EQ(upload.device().max_rows, 5);
  EXPECT_EQ(upload.device().max_positions, 35);
}

// The host uploads steps far ahead of the device, which copies each step's table to other memory.
TEST_F(StepTableUploadTest, StepsOverlapSafely) {
  constexpr int kSteps = 200;
  constexpr int kPages = 20000;
  cudaStream_t stream;
  ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceBuffer<int32_t> seen(int64_t{kSteps} * kPages);
  StepTableUpload upload;
  std::vector<int32_t> pages(kPages);
  for (int step = 0; step < kSteps; ++step) {
    std::iota(pages.begin(), pages.end(), step);
    const std::vector<SequenceRows> sequences = {{0, 1, kPages - 1, pages.data()}};
    ASSERT_TRUE(upload.Upload({}, sequences, 1, {}, stream).ok());
    ISOBIT_CHECK_CUDA(cudaMemcpyAsync(seen.data() + int64_t{step} * kPages, upload.device().pages,
                                      kPages * sizeof(int32_t), cudaMemcpyDefault, stream));
  }
  EXPECT_EQ(upload.generation(), 1);
  const std::vector<int32_t> values = seen.CopyOut();
  for (int step = 0; step < kSteps; ++step) {
    for (int i = 0; i < kPages; ++i) {
      ASSERT_EQ(values[static_cast<size_t>(step * kPages + i)], step + i) << step;
    }
  }
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST_F(StepTableUploadTest, AddressesDependOnThePaddedSizesAlone) {
  const std::vector<int32_t> pages(100, 5);
  const StepBounds bounds = {.num_rows = 8, .num_sequences = 8};
  StepTableUpload upload;
  ASSERT_TRUE(upload.Reserve(64, 64, 4096).ok());
  const int64_t generation = upload.generation();
  ASSERT_TRUE(upload.Upload({1}, {{0, 1, 0, pages.data()}}, 16, bounds, nullptr).ok());
  const DeviceSequences before = upload.device();
  const std::vector<SequenceRows> larger = {{0, 4, 1000, pages.data()}, {4, 4, 7, pages.data()}};
  ASSERT_TRUE(upload.Upload({1, 2, 3}, larger, 16, bounds, nullptr).ok());
  EXPECT_EQ(upload.generation(), generation);
  EXPECT_EQ(upload.device().first_row, before.first_row);
  EXPECT_EQ(upload.device().first_position, before.first_position);
  EXPECT_EQ(upload.device().first_page, before.first_page);
  EXPECT_EQ(upload.device().pages, before.pages);
  EXPECT_EQ(upload.device().sequence_of_row, before.sequence_of_row);
  ASSERT_TRUE(upload.Reserve(64, 64, 1 << 20).ok());
  EXPECT_GT(upload.generation(), generation);
}

TEST_F(StepTableUploadTest, RefusesPositionsBeyondInt32) {
  StepTableUpload upload;
  const std::vector<SequenceRows> sequences = {{0, 1, int64_t{1} << 31, nullptr}};
  EXPECT_EQ(upload.Upload({}, sequences, 16, {}, nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace isobit::cuda
