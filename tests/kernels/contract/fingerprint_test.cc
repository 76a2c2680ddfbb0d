// The fingerprint tells modes and models apart, and is the same on every machine and build: a
// changed constant, coefficient or operation shows here first.
#include "kernels/contract/fingerprint.h"

#include <string>

#include "gtest/gtest.h"

namespace isobit::contract {
namespace {

TEST(FingerprintTest, TellsModesAndModelsApart) {
  const std::string base = Fingerprint("tree", "model a");
  EXPECT_EQ(base.size(), 64u);
  EXPECT_EQ(Fingerprint("tree", "model a"), base);
  EXPECT_NE(Fingerprint("vanilla", "model a"), base);
  EXPECT_NE(Fingerprint("tree", "model b"), base);
  EXPECT_NE(Fingerprint("tree", ""), Fingerprint("", "tree"));
}

// Whoever changes this value on purpose raises kContractVersion.
TEST(FingerprintTest, Golden) {
  EXPECT_EQ(Fingerprint("tree", ""),
            "620c7a302a2b9f256361c6175228e9252ef7089279440b7f55784c0360d2c768");
}

}  // namespace
}  // namespace isobit::contract
