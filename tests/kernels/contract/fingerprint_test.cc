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
            "29bc8742818924e3999e7be515f702fe1e02e8593796abf6f20c6be004032516");
}

}  // namespace
}  // namespace isobit::contract
