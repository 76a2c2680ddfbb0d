// Access files: what they may say, hostile ones, who is found in them, and files that change.
#include "common/access/access_list.h"

#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/digest.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::string Hash(const std::string& token) { return Sha256Hex(token.data(), token.size()); }

std::string Clients(const std::string& clients) {
  return absl::StrCat("{\"clients\": [", clients, "]}");
}

std::string Client(const std::string& name, const std::string& role, const std::string& token) {
  return absl::StrCat("{\"name\": \"", name, "\", \"roles\": [\"", role,
                      "\"], \"token_sha256\": [\"", Hash(token), "\"]}");
}

TEST(AccessListTest, FindsClientsByTokenAndByCertificate) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const AccessList list,
      AccessList::Parse(
          Clients(absl::StrCat(Client("trainer", "score", "t0ken"), ", ",
                               R"({"name": "ops", "roles": ["admin", "watch"], )"
                               R"("certificates": ["ops.example", "spiffe://cluster/ops"]})")),
          "access.json"));
  ASSERT_NE(list.ByToken("t0ken"), nullptr);
  EXPECT_EQ(list.ByToken("t0ken")->name, "trainer");
  EXPECT_EQ(list.ByToken("t0ken")->roles, RoleSet(CallerRole::kScore));
  for (const char* wrong : {"", "t0keN", "t0ken ", "t0ke", "t0kent0ken"}) {
    EXPECT_EQ(list.ByToken(wrong), nullptr) << wrong;
  }
  EXPECT_EQ(list.ByToken(Hash("t0ken")), nullptr) << "who reads the file has no token";
  const AccessClient* const ops = list.ByCertificate({"x", "spiffe://cluster/ops"});
  ASSERT_NE(ops, nullptr);
  EXPECT_EQ(ops->roles, RoleSet(CallerRole::kAdmin, CallerRole::kWatch));
  EXPECT_EQ(list.ByCertificate({"ops"}), nullptr);
  EXPECT_EQ(list.ByCertificate({}), nullptr);
  EXPECT_EQ(list.ByCertificate({"trainer"}), nullptr) << "a name alone is no certificate";
}

TEST(AccessListTest, RefusesWhatItDoesNotUnderstand) {
  const std::string hash = absl::StrCat("\"", Hash("x"), "\"");
  const std::string long_name(257, 'a');
  const std::pair<std::string, const char*> cases[] = {
      {"", "access.json"},
      {"[]", "access.json"},
      {"{}", "clients"},
      {R"({"clients": {}})", "clients"},
      {R"({"clients": [], "more": 1})", "clients"},
      {Clients("7"), "clients[0]: expected an object"},
      {Clients(R"({"roles": ["watch"], "certificates": ["a"]})"), "a name"},
      {Clients(R"({"name": 3, "roles": ["watch"], "certificates": ["a"]})"), "name"},
      {Clients(R"({"name": "", "roles": ["watch"], "certificates": ["a"]})"), "name"},
      {Clients(R"({"name": "a\nb", "roles": ["watch"], "certificates": ["a"]})"), "printable"},
      {Clients(absl::StrCat(R"({"name": ")", long_name,
                            R"(", "roles": ["watch"], "certificates": ["a"]})")),
       "256"},
      {Clients(R"({"name": "a", "certificates": ["a"]})"), "at least one role"},
      {Clients(R"({"name": "a", "roles": [], "certificates": ["a"]})"), "at least one role"},
      {Clients(R"({"name": "a", "roles": "admin", "certificates": ["a"]})"), "array"},
      {Clients(R"({"name": "a", "roles": ["root"], "certificates": ["a"]})"), "root"},
      {Clients(R"({"name": "a", "roles": ["Admin"], "certificates": ["a"]})"), "Admin"},
      {Clients(R"({"name": "a", "roles": ["admin"]})"), "token_sha256 or certificates"},
      {Clients(R"({"name": "a", "roles": ["admin"], "certificates": [""]})"), "certificates[0]"},
      {Clients(R"({"name": "a", "roles": ["admin"], "token": "secret"})"), "token"},
      {Clients(R"({"name": "a", "roles": ["admin"], "token_sha256": ["secret"]})"), "64 hex"},
      {Clients(absl::StrCat(R"({"name": "a", "roles": ["admin"], "token_sha256": [")",
                            std::string(64, 'g'), R"("]})")),
       "64 hex"},
      {Clients(absl::StrCat(Client("a", "watch", "1"), ",", Client("a", "admin", "2"))), "twice"},
      {Clients(absl::StrCat(Client("a", "watch", "1"), ",", Client("b", "admin", "1"))), "twice"},
      {R"({"clients": [], "clients": []})", "twice"},
      {Clients(R"({"name": "a", "name": "b", "roles": ["admin"], "certificates": ["a"]})"),
       "twice"},
      {Clients(absl::StrCat(std::string(2000, '['), std::string(2000, ']'))), "access.json"},
  };
  for (const auto& [text, expected] : cases) {
    const auto list = AccessList::Parse(text, "access.json");
    EXPECT_THAT(list, StatusIs(kInvalid, HasSubstr(expected))) << text.substr(0, 200);
    EXPECT_THAT(std::string(list.status().message()), testing::Not(HasSubstr("secret")));
  }
}

TEST(AccessListTest, NoMutationOfAFileBreaksTheParserOrMakesAnAdmin) {
  const std::string good = Clients(absl::StrCat(Client("one", "watch", "1"), ",",
                                                R"({"name": "two", "roles": ["score"], )",
                                                R"("certificates": ["two.example"]})"));
  std::mt19937 random(7);
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = good;
    for (uint32_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % text.size();
      if (random() % 2 == 0) {
        text[at] = static_cast<char>(random() % 256);
      } else {
        text.erase(at, 1 + random() % 8);
      }
      if (text.empty()) text.push_back('{');
    }
    const auto list = AccessList::Parse(text, "f");
    if (!list.ok()) continue;
    ++accepted;
    const AccessClient* const one = list->ByToken("1");
    EXPECT_FALSE(one != nullptr && one->roles.Has(CallerRole::kAdmin)) << text;
  }
  EXPECT_GT(accepted, 0);
}

TEST(AccessFileTest, AChangedFileCountsAtOnceAndABrokenOneLeavesTheOldInForce) {
  const TempDir dir;
  const std::string path = dir.Write("access.json", Clients(Client("a", "watch", "1")));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto file, AccessFile::Open(path));
  EXPECT_NE(file->Current()->ByToken("1"), nullptr);

  dir.Write("access.json", Clients(Client("a", "watch", "2")));
  EXPECT_EQ(file->Current()->ByToken("1"), nullptr);
  EXPECT_NE(file->Current()->ByToken("2"), nullptr);

  dir.Write("access.json", "{ broken");
  EXPECT_NE(file->Current()->ByToken("2"), nullptr);
  ASSERT_EQ(std::remove(path.c_str()), 0);
  EXPECT_NE(file->Current()->ByToken("2"), nullptr);

  dir.Write("access.json", Clients(Client("a", "watch", "3")));
  EXPECT_NE(file->Current()->ByToken("3"), nullptr);
  EXPECT_EQ(file->Current()->ByToken("2"), nullptr);
}

TEST(AccessFileTest, AMissingOrOversizedFileIsAnErrorAtTheStart) {
  const TempDir dir;
  EXPECT_THAT(AccessFile::Open(dir.File("none")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("--access_file")));
  EXPECT_THAT(AccessFile::Open(dir.path()), StatusIs(kInvalid, HasSubstr("expected a file")));
  EXPECT_THAT(AccessFile::Open(dir.Write("big", std::string((1 << 20) + 1, ' '))),
              StatusIs(kInvalid, HasSubstr("1048577 bytes")));
}

}  // namespace
}  // namespace isobit
