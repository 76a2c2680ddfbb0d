// Which process this one is, by flags, torchrun or LeaderWorkerSet.
#include "trainer_bridge/scorer/process_place.h"

#include <map>
#include <string>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

using Environment = std::map<std::string, std::string>;

absl::StatusOr<ProcessPlace> Place(const PlaceFlags& flags, const Environment& environment) {
  return PlaceOfProcess(flags, [&environment](const char* name) -> const char* {
    const auto variable = environment.find(name);
    return variable == environment.end() ? nullptr : variable->second.c_str();
  });
}

const Environment kTorchrun = {{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node0"},
                               {"MASTER_PORT", "1234"}};
const Environment kLeaderWorkerSet = {
    {"LWS_WORKER_INDEX", "2"}, {"LWS_GROUP_SIZE", "4"}, {"LWS_LEADER_ADDRESS", "scorer-0.scorer"}};

TEST(ProcessPlaceTest, AloneByDefault) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ProcessPlace place, Place({}, {}));
  EXPECT_EQ(place.rank, 0);
  EXPECT_EQ(place.world_size, 1);
}

TEST(ProcessPlaceTest, AloneInATrainersEnvironment) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ProcessPlace place, Place({.world_size = 1}, kTorchrun));
  EXPECT_EQ(place.rank, 0);
  EXPECT_EQ(place.world_size, 1);
  EXPECT_EQ(place.local_rank, 0);
  EXPECT_THAT(Place({.rank = 1, .world_size = 1}, kTorchrun),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--rank is 1")));
}

TEST(ProcessPlaceTest, TorchrunsVariables) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ProcessPlace place, Place({}, kTorchrun));
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.world_size, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.master_addr, "node0");
  EXPECT_EQ(place.master_port, 1234);
}

TEST(ProcessPlaceTest, ThePortThatTorchrunTakesIsLeftToIt) {
  Environment environment = kTorchrun;
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(Place({}, environment)->master_port, 1235);
  EXPECT_EQ(Place({.master_port = 1234}, environment)->master_port, 1234);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_EQ(Place({}, environment)->master_port, 1234);
}

TEST(ProcessPlaceTest, LeaderWorkerSetsVariables) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ProcessPlace place, Place({}, kLeaderWorkerSet));
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.world_size, 4);
  EXPECT_EQ(place.local_rank, 0);
  EXPECT_EQ(place.master_addr, "scorer-0.scorer");
  EXPECT_EQ(place.master_port, 29500);
}

TEST(ProcessPlaceTest, FlagsGoFirst) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const ProcessPlace place,
      Place({.rank = 1, .world_size = 2, .master_addr = "here", .master_port = 7}, kTorchrun));
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.world_size, 2);
  EXPECT_EQ(place.master_addr, "here");
  EXPECT_EQ(place.master_port, 7);
}

TEST(ProcessPlaceTest, SaysWhatIsWrong) {
  const auto with = [](Environment environment, const char* name, const char* value) {
    environment[name] = value;
    return environment;
  };
  const auto invalid = [](const char* what) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what));
  };
  EXPECT_THAT(Place({.world_size = 2, .master_addr = "here"}, {}), invalid("--rank"));
  EXPECT_THAT(Place({.rank = 0, .world_size = 2}, {}), invalid("--master_addr"));
  EXPECT_THAT(Place({.rank = 2, .world_size = 2, .master_addr = "here"}, {}),
              invalid("--rank is 2, expected 0 to 1"));
  EXPECT_THAT(Place({.rank = 1}, {}), invalid("--rank is 1"));
  EXPECT_THAT(Place({.world_size = 0}, {}), invalid("--world_size is 0"));
  EXPECT_THAT(Place({}, with(kTorchrun, "RANK", "8")), invalid("RANK is 8, expected 0 to 7"));
  EXPECT_THAT(Place({}, with(kTorchrun, "RANK", "one")), invalid("RANK is \"one\""));
  EXPECT_THAT(Place({}, with(kTorchrun, "MASTER_PORT", "0")), invalid("MASTER_PORT is 0"));
  EXPECT_THAT(Place({}, with(kTorchrun, "MASTER_ADDR", "")), invalid("MASTER_ADDR"));
}

}  // namespace
}  // namespace isobit
