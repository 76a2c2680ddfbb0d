// The events of the live page: their state in one word, their numbers, and what the history keeps.
#include "trainer_bridge/comparator/page_event.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "trainer_bridge/comparator/history.h"

namespace isobit {
namespace {

using Json = nlohmann::json;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

v1::TokenLogprobs Tokens(const std::vector<float>& logprobs) {
  v1::TokenLogprobs tokens;
  for (const float logprob : logprobs) {
    tokens.add_token_ids(static_cast<uint32_t>(7 + tokens.token_ids_size()));
    tokens.add_logprobs(logprob);
    tokens.add_weight_versions(3);
  }
  return tokens;
}

// `steps` fp32 numbers below -1.
float Below(uint32_t steps) { return std::bit_cast<float>(std::bit_cast<uint32_t>(-1.0f) + steps); }

template <typename Info>
Info InfoWith(uint64_t version, const std::string& digest) {
  Info info;
  info.mutable_server()->mutable_fingerprint()->set_hex("abc");
  info.mutable_server()->mutable_weight_version()->set_id(version);
  info.mutable_server()->mutable_weight_version()->set_digest(digest);
  return info;
}

UpstreamInfos Sides(const std::string& scorer_digest = "d") {
  return {InfoWith<v1::RolloutServerInfo>(1, "d"),
          InfoWith<v1::ScorerServerInfo>(1, scorer_digest)};
}

class PageEventTest : public ::testing::Test {
 protected:
  std::string State(const UpstreamInfos& sides = Sides()) const {
    return StateOf(history_.Look(8, 8, 0), sides);
  }
  Json Event(uint64_t revision = 0) const {
    return Json::parse(PageEvent(history_.Look(8, 8, revision), Sides(), texts_, revision == 0));
  }
  void Compare(const std::string& id, const std::vector<float>& rollout,
               const std::vector<float>& scorer) {
    history_.Add(CompareTokens(id, Tokens(rollout), Tokens(scorer)));
  }

  History history_;
  TokenTexts texts_;
};

TEST_F(PageEventTest, TheStateSaysTheWorst) {
  const UpstreamInfos silent = {absl::UnavailableError("gone"),
                                InfoWith<v1::ScorerServerInfo>(1, "d")};
  const UpstreamInfos empty = {InfoWith<v1::RolloutServerInfo>(0, ""),
                               InfoWith<v1::ScorerServerInfo>(1, "d")};
  EXPECT_EQ(State(), "ready");
  EXPECT_EQ(State(silent), "waiting");
  EXPECT_EQ(State(empty), "waiting") << "no weights yet";
  EXPECT_EQ(State(Sides("other")), "refused");
  History::Comparison comparison = history_.Begin();
  EXPECT_EQ(State(), "comparing");
  comparison.reset();
  EXPECT_EQ(State(), "ready");
  Compare("a", {-1, -2}, {-1, -2});
  EXPECT_EQ(State(), "equal");
  EXPECT_EQ(State(silent), "waiting");
  history_.Refuse(absl::InvalidArgumentError("lengths"), 2);
  EXPECT_EQ(State(), "unequal") << "two tokens lack a logprob";
  EXPECT_EQ(State(silent), "unequal");
}

TEST_F(PageEventTest, AnUnequalTokenIsTheState) {
  Compare("a", {-1}, {Below(1)});
  EXPECT_EQ(State(), "unequal");
  EXPECT_EQ(State(Sides("other")), "unequal");
}

TEST_F(PageEventTest, AnImpossibleTokenIsAStateAndAmongTheWorst) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Compare("good", {-1}, {-1});
  Compare("odd", {-1, -kInf}, {-1, -kInf});
  EXPECT_EQ(State(), "impossible");
  const Json event = Event();
  EXPECT_EQ(event["total"]["unequal"], 0);
  EXPECT_EQ(event["total"]["impossible"], 1);
  EXPECT_EQ(event["window"]["impossible"], 1);
  EXPECT_EQ(event["total"]["kl_k3"], "NaN");
  EXPECT_EQ(event["seconds"].back()[5], "NaN");
  EXPECT_EQ(event["worst"][0]["sequence"], "odd");
  EXPECT_EQ(event["worst"][0]["rollout_bits"], "0xff800000");
  EXPECT_EQ(event["sequences"][1]["impossible"], 1);
  EXPECT_EQ(event["sequences"][1]["strip"], "09");
  Compare("far", {-1}, {Below(1u << 22)});
  EXPECT_EQ(State(), "unequal");
  EXPECT_EQ(Event()["worst"][0]["sequence"], "odd") << "impossible is worse than far";
}

TEST_F(PageEventTest, StripsShowDistancesByToken) {
  Compare("near", {-1, -1, -1, -1, -1}, {-1, Below(1), Below(3), Below(4), Below(1u << 22)});
  Compare("nan", {kNan, -1}, {-1, -1});
  Compare("both", {kNan}, {kNan});
  const Json sequences = Event()["sequences"];
  EXPECT_EQ(sequences[0]["strip"], "01238");
  EXPECT_EQ(sequences[0]["first"], 1);
  EXPECT_EQ(sequences[1]["strip"], "90");
  EXPECT_EQ(sequences[2]["strip"], "9") << "a NaN on both sides is no agreement";
  EXPECT_FALSE(sequences[0].contains("texts"));
}

TEST_F(PageEventTest, LongStripsKeepTheWorstOfEachRun) {
  const size_t size = 3 * SequenceOutcome::kMaxStrip - 1;
  std::vector<float> rollout(size, -1), scorer(size, -1);
  scorer[4] = Below(1);
  scorer[5] = kNan;
  scorer[size - 1] = Below(2);
  Compare("long", rollout, scorer);
  const std::string strip = Event()["sequences"][0]["strip"];
  ASSERT_EQ(strip.size(), SequenceOutcome::kMaxStrip);
  EXPECT_EQ(strip.substr(0, 3), "090");
  EXPECT_EQ(strip.back(), '2');
  EXPECT_EQ(std::count(strip.begin(), strip.end(), '0'), 254);
}

TEST_F(PageEventTest, TheWorstTokensComeFirstWithTheirBits) {
  for (uint32_t i = 1; i <= 40; ++i) Compare(absl::StrCat("s", i), {-1, -1}, {-1, Below(i)});
  const Json worst = Event()["worst"];
  ASSERT_EQ(worst.size(), History::kMaxWorst);
  EXPECT_EQ(worst[0]["sequence"], "s40");
  EXPECT_EQ(worst[0]["ulp"], 40);
  EXPECT_EQ(worst[0]["position"], 1);
  EXPECT_EQ(worst[0]["token"], 8);
  EXPECT_EQ(worst[0]["rollout_bits"], "0xbf800000");
  EXPECT_EQ(worst[0]["scorer_bits"], "0xbf800028");
  EXPECT_EQ(worst[0]["version"], 3);
  EXPECT_EQ(worst[23]["ulp"], 17);
  Compare("nan", {kNan}, {-1});
  EXPECT_EQ(Event()["worst"][0]["dlogp"], "NaN") << "nothing is further apart";
}

TEST_F(PageEventTest, NumbersThatJsonLacksAreText) {
  Compare("a", {-std::numeric_limits<float>::infinity()}, {-1});
  EXPECT_EQ(Event()["total"]["max_abs_dlogp"], "Infinity");
  EXPECT_EQ(Event()["worst"][0]["rollout"], "-Infinity");
}

TEST_F(PageEventTest, LaterEventsBringOnlySecondsThatChanged) {
  Compare("a", {-1}, {-1});
  const uint64_t revision = history_.revision();
  EXPECT_EQ(Event()["seconds"].size(), 1u);
  EXPECT_TRUE(Event()["first"]);
  EXPECT_EQ(Event(revision)["seconds"].size(), 0u);
  Compare("b", {-1}, {Below(1)});
  const Json seconds = Event(revision)["seconds"];
  ASSERT_EQ(seconds.size(), 1u);
  EXPECT_GE(seconds[0][1], 1);
  EXPECT_EQ(seconds[0][2], 1) << "one token differs";
}

TEST_F(PageEventTest, RefusalsAndMarksAreBounded) {
  for (int i = 0; i < 300; ++i) {
    history_.Refuse(absl::FailedPreconditionError(std::string(2000, 'x')));
    history_.AddMark("rollout", v1::WeightVersion());
  }
  EXPECT_EQ(Event()["refusals"].size(), History::kMaxRefusals);
  EXPECT_EQ(Event()["refusals"][0]["why"].get<std::string>().size(), 512u);
  EXPECT_EQ(Event()["marks"].size(), History::kMaxMarks);
  EXPECT_EQ(Event()["refused"], 300);
}

TEST(TokenTextsTest, NamesBecomeBytes) {
  EXPECT_EQ(BytesOfTokenName("\u0120Hello", /*is_byte_level=*/true), " Hello");
  EXPECT_EQ(BytesOfTokenName("\u010A", true), "\n");
  EXPECT_EQ(BytesOfTokenName("\u00C3\u00A9", true), "\u00E9") << "two bytes, one character";
  EXPECT_EQ(BytesOfTokenName("\u4E16", true), "\u4E16") << "no byte-level name stays as it is";
  EXPECT_EQ(BytesOfTokenName("\u2581Hello", false), " Hello");
  EXPECT_EQ(BytesOfTokenName("<0x0A>", false), "\n");
  EXPECT_EQ(BytesOfTokenName("<0xZZ>", false), "<0xZZ>");
}

TEST(TokenTextsTest, ReadsATokenizer) {
  const testing_support::TempDir dir;
  const std::string path = absl::StrCat(dir.path(), "/tokenizer.json");
  std::ofstream(path) << R"({"model": {"vocab": {"\u0120a": 0, "b": 1}},
      "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
      "added_tokens": [{"id": 2, "content": "<end>"}]})";
  const auto texts = TokenTexts::Read(path);
  ISOBIT_ASSERT_OK(texts.status());
  EXPECT_EQ(texts->Of(0), " a");
  EXPECT_EQ(texts->Of(2), "<end>");
  EXPECT_EQ(texts->Of(3), "");
  for (const char* bad : {"", "{", "[]", "{}", R"({"model": {"vocab": {"a": "b"}}})"}) {
    std::ofstream(path) << bad;
    EXPECT_EQ(TokenTexts::Read(path).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(TokenTexts::Read(absl::StrCat(dir.path(), "/none")).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace isobit
