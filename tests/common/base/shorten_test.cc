// Text is cut between characters, and says so.
#include "common/base/shorten.h"

#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(ShortenTest, KeepsWhatFitsAndCutsWholeCharacters) {
  EXPECT_EQ(Shorten("", 0), "");
  EXPECT_EQ(Shorten("abc", 3), "abc");
  EXPECT_EQ(Shorten("abcd", 3), "abc... (4 bytes)");
  EXPECT_EQ(Shorten("a\u00e4\u00f6", 3), "a\u00e4... (5 bytes)");
  EXPECT_EQ(Shorten("a\u00e4\u00f6", 4), "a\u00e4... (5 bytes)");
  EXPECT_EQ(Shorten("\u20ac", 2), "... (3 bytes)");
  EXPECT_EQ(Shorten("\x80\x80\x80", 2), "... (3 bytes)") << "no UTF-8, but no harm either";
}

}  // namespace
}  // namespace isobit
