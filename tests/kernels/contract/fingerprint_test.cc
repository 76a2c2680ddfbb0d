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
            "6b2227301c4fb41d0df84eca895d3e9e21b4782f3480b521e03250edd49a167e");
}

}  // namespace
}  // namespace isobit::contract
