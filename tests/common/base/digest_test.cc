// SHA-256 against the published vectors of FIPS 180-2.
#include "common/base/digest.h"

#include <algorithm>
#include <string>

#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(DigestTest, EmptyInput) {
  EXPECT_EQ(Sha256Hex(nullptr, 0),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(DigestTest, Abc) {
  EXPECT_EQ(Sha256Hex("abc", 3),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(DigestTest, MillionLettersWhateverTheSplit) {
  const std::string letters(1000000, 'a');
  const std::string expected = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
  EXPECT_EQ(Sha256Hex(letters.data(), letters.size()), expected);
  Sha256 hash;
  size_t step = 1;
  for (size_t at = 0; at < letters.size(); at += step, step = step * 3 % 1009 + 1) {
    hash.Update(letters.data() + at, std::min(step, letters.size() - at));
  }
  EXPECT_EQ(hash.HexFinish(), expected);
}

TEST(DigestDeathTest, UpdateAfterFinishIsABug) {
  Sha256 hash;
  hash.HexFinish();
  EXPECT_DEATH(hash.Update("a", 1), "Update after HexFinish");
}

}  // namespace
}  // namespace isobit
