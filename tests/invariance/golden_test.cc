// The CPU backend against the golden bits (golden.h). With GOLDEN_VALUES in the environment, the
// logits go to files of that directory too, for mutations.py to count those that changed.
#include "tests/invariance/golden.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/invariance/forward_harness.h"
#include "tests/support/test_name.h"

namespace isobit::invariance {
namespace {

void WriteValues(const std::string& name, const SequenceLogits& logits) {
  const char* directory = std::getenv("GOLDEN_VALUES");
  if (directory == nullptr) return;
  std::ofstream file(std::string(directory) + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(logits.data()),
             static_cast<std::streamsize>(logits.size() * sizeof(float)));
}

// A sanitizer judges no bits: it goes without the long models, which run no code that the others do
// not.
std::vector<std::string> Names() {
  std::vector<std::string> names = GoldenNames();
#ifdef ISOBIT_SANITIZED
  std::erase_if(names, [](const std::string& n) { return n == "smollm2" || n == "witness-long"; });
#endif
  return names;
}

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, DigestsHold) {
  const std::string directory = GoldenModelDirectory(GetParam());
  if (!std::filesystem::exists(directory + "/config.json")) {
    GTEST_SKIP() << directory << " is not there: python -m isobit.convert.smollm2 makes it";
  }
  const ForwardHarness model(directory);
  const Tokens tokens = GoldenTokens(GetParam(), model);
  Schedule schedule;
  schedule.make_ops = [] { return MakeCpuBackend({.num_threads = 2}); };
  const SequenceLogits logits = model.Run({tokens}, schedule)[0];
  WriteValues(GetParam(), logits);
  const nlohmann::json actual = DigestsOf(model, tokens, logits, *schedule.make_ops());
  EXPECT_EQ(actual, GoldenDigests(GetParam())) << "\"" << GetParam() << "\": " << actual.dump(2);
}

TEST(GoldenRowTest, ManyWeights) {
  const nlohmann::json actual = ManyWeightsDigest(*MakeCpuBackend({}));
  EXPECT_EQ(actual, GoldenDigests("many-weights")) << "\"many-weights\": " << actual.dump(2);
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTest, testing::ValuesIn(Names()), testing_support::TestName);

}  // namespace
}  // namespace isobit::invariance
