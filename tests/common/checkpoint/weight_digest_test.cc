// The weight digest: its definition, by golden values of another implementation; what it does not
// depend on; and what it sees.
#include "common/checkpoint/weight_digest.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace isobit {
namespace {

using Values = std::vector<uint16_t>;

std::string DigestOf(const Values& values, const std::vector<int64_t>& shape) {
  TensorDigester digester(shape);
  digester.Add(DType::kBf16, values.data(), values.size());
  return digester.Hex();
}

Values Counting(size_t count) {
  Values values(count);
  std::iota(values.begin(), values.end(), uint16_t{0});
  return values;
}

Values Random(size_t count) {
  std::mt19937 random(1);
  Values values(count);
  for (uint16_t& value : values) value = static_cast<uint16_t>(random());
  return values;
}

// The values are those of tests/python/weight_digest_test.py, where plain Python integers follow
// the definition word by word.
TEST(WeightDigestTest, FollowsItsDefinition) {
  EXPECT_EQ(DigestOf(Counting(15), {3, 5}), "84df1995e04eb555f2471723004df1e9");
  EXPECT_EQ(DigestOf({0x3f80, 0xc000}, {2}), "7b1c530f6c9ce66681a091658810a374");
  EXPECT_EQ(DigestOf(Counting(65536), {256, 256}), "061d16ecadbab8b015468d44b4985141");
  EXPECT_EQ(WeightDigest({{"a", {{2}, "7b1c530f6c9ce66681a091658810a374"}},
                          {"b", {{3, 5}, "84df1995e04eb555f2471723004df1e9"}}}),
            "9c383dff68f787e1ce475dfb3dd7ef6e9138bda09295d612bb015f21150e930b");
}

TEST(WeightDigestTest, PortionsAndDTypesDoNotMatter) {
  std::mt19937 random(2);
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {}, {1}, {999}, {37, 9}, {37, 10}, {37, 11}, {37, 12}, {5, 3, 7}, {1, 1023}, {0, 4}}) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    Values values(count);
    std::vector<float> wide(count);
    Values halves(count);  // fp16
    for (size_t i = 0; i < count; ++i) {
      // Values that bf16 and fp16 both have.
      halves[i] = static_cast<uint16_t>((random() & 0x8000) | 0x3c00 | ((random() & 0x7f) << 3));
      ConvertToFloat(DType::kF16, &halves[i], 1, &wide[i]);
      ConvertToBf16(DType::kF32, &wide[i], 1, &values[i]);
    }
    const std::string whole = DigestOf(values, shape);
    for (int round = 0; round < 20; ++round) {
      TensorDigester digester(shape);
      for (size_t at = 0; at < count;) {
        const size_t now = std::min<size_t>(1 + random() % 40, count - at);
        switch (random() % 3) {
          case 0:
            digester.Add(DType::kBf16, &values[at], now);
            break;
          case 1:
            digester.Add(DType::kF16, &halves[at], now);
            break;
          default:
            digester.Add(DType::kF32, &wide[at], now);
        }
        at += now;
      }
      EXPECT_EQ(digester.Hex(), whole) << ShapeString(shape);
    }
  }
}

TEST(WeightDigestTest, RoundsToBf16) {
  const float between = 1.00390625f + 1e-6f;  // above the middle of two neighbours
  TensorDigester digester({1});
  digester.Add(DType::kF32, &between, 1);
  EXPECT_EQ(digester.Hex(), DigestOf({0x3f81}, {1}));
}

TEST(WeightDigestTest, SeesEveryBit) {
  for (const int64_t columns : {5, 8}) {
    const Values values = Random(static_cast<size_t>(columns) * 20);
    const std::string digest = DigestOf(values, {20, columns});
    for (size_t i = 0; i < values.size(); ++i) {
      for (int bit = 0; bit < 16; ++bit) {
        Values changed = values;
        changed[i] = static_cast<uint16_t>(changed[i] ^ (1 << bit));
        const std::string other = DigestOf(changed, {20, columns});
        EXPECT_NE(other.substr(0, 16), digest.substr(0, 16)) << i << " " << bit;
        EXPECT_NE(other.substr(16), digest.substr(16)) << i << " " << bit;
      }
    }
  }
}

TEST(WeightDigestTest, SeesWhatIsExchangedOrMoved) {
  const Values values = Random(640);
  const std::string digest = DigestOf(values, {20, 32});
  const auto expect_seen = [&](const char* what, const Values& changed) {
    EXPECT_NE(DigestOf(changed, {20, 32}), digest) << what;
  };
  Values changed = values;
  std::swap_ranges(changed.begin(), changed.begin() + 4, changed.begin() + 36);
  expect_seen("two words", changed);
  changed = values;
  std::swap_ranges(changed.begin() + 64, changed.begin() + 96, changed.begin() + 320);
  expect_seen("two rows", changed);
  changed = values;
  std::ranges::reverse(changed);
  expect_seen("all values", changed);
  changed = values;
  changed[1] = 0;
  changed[0] = 0;
  changed[2] = 0;
  changed[3] = 0;
  expect_seen("a word of zeros", changed);
  Values moved(640, 0);
  moved[8] = 1;
  Values elsewhere(640, 0);
  elsewhere[12] = 1;
  EXPECT_NE(DigestOf(moved, {20, 32}), DigestOf(elsewhere, {20, 32})) << "one value among zeros";
}

TEST(WeightDigestTest, OfAModelCoversNamesAndShapes) {
  const ShapedDigest a = {{2, 2}, "a"};
  const ShapedDigest b = {{2, 2}, "b"};
  const ShapedDigest flat = {{4}, "a"};
  const std::string digest = WeightDigest({{"x", a}, {"y", b}});
  EXPECT_EQ(digest.size(), 64u);
  EXPECT_NE(WeightDigest({{"x", b}, {"y", a}}), digest);
  EXPECT_NE(WeightDigest({{"x", a}, {"z", b}}), digest);
  EXPECT_NE(WeightDigest({{"x", flat}, {"y", b}}), digest);
  EXPECT_NE(WeightDigest({{"x", a}}), digest);
  EXPECT_NE(WeightDigest({{"x [2, 2] a\n1 y", b}}), digest);
}

TEST(WeightDigestTest, OneModelHasOneDigest) {
  const ShapedDigest embedding = {{5, 2}, "e"};
  const TensorDigests plain = {{"model.embed_tokens.weight", embedding}, {"x", {{2}, "x"}}};
  const std::string digest = WeightDigest(plain);
  const auto with = [&](const std::string& name, const ShapedDigest& tensor) {
    TensorDigests more = plain;
    more[name] = tensor;
    return WeightDigest(more);
  };
  EXPECT_EQ(with("lm_head.weight", embedding), digest);
  for (const char* buffer :
       {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached", "model.rotary_pos_emb.sin_cached"}) {
    EXPECT_EQ(with(buffer, {{8}, "f"}), digest) << buffer;
  }
  // Controls: a head of its own, another tensor that equals the embedding, names that only look so.
  EXPECT_NE(with("lm_head.weight", {{5, 2}, "h"}), digest);
  EXPECT_NE(with("lm_head.weight", {{2, 5}, "e"}), digest);
  for (const char* name : {"lm_head.bias", "inv_freq", "rotary_emb.weight", "model.inv_freq"}) {
    EXPECT_NE(with(name, embedding), digest) << name;
  }
}

TEST(WeightDigestTest, FindsTheFirstValueThatIsNotFinite) {
  const Values finite = {0x7f7f, 0xff7f, 0x0000, 0x8000, 0x0080, 0x807f, 0x3f80};
  const Values nonfinite = {0x7f80, 0xff80, 0x7f81, 0xffff, 0x7fc0};
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {}, {1}, {999}, {37, 9}, {37, 12}, {5, 3, 7}, {9, 1024}, {2, 70001}}) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    Values values(count);
    for (size_t i = 0; i < count; ++i) values[i] = finite[i % finite.size()];
    const auto first = [&](size_t portion) {
      TensorDigester digester(shape);
      for (size_t at = 0; at < count; at += portion) {
        digester.Add(DType::kBf16, values.data() + at, std::min(portion, count - at));
      }
      return digester.first_nonfinite();
    };
    EXPECT_EQ(first(count), std::nullopt);
    for (const size_t at : {count - 1, count / 2, size_t{0}}) {  // each before the last
      values[at] = nonfinite[at % nonfinite.size()];
      for (const size_t portion : {count, size_t{1}, size_t{7}, size_t{64}}) {
        EXPECT_EQ(first(portion), at) << count << " in portions of " << portion;
      }
    }
  }
}

TEST(WeightDigestTest, FiniteMeansFiniteInBf16) {
  const auto first = [](DType dtype, const auto& value) {
    TensorDigester digester({1});
    digester.Add(dtype, &value, 1);
    return digester.first_nonfinite();
  };
  EXPECT_EQ(first(DType::kF32, 3.3895314e38f), std::nullopt);  // the largest of bf16
  EXPECT_EQ(first(DType::kF32, 3.4028235e38f), 0U);            // the largest of fp32
  EXPECT_EQ(first(DType::kF32, -INFINITY), 0U);
  EXPECT_EQ(first(DType::kF32, NAN), 0U);
  EXPECT_EQ(first(DType::kF16, uint16_t{0x7bff}), std::nullopt);  // 65504
  EXPECT_EQ(first(DType::kF16, uint16_t{0xfc00}), 0U);
  EXPECT_EQ(first(DType::kF16, uint16_t{0x7c01}), 0U);
}

}  // namespace
}  // namespace isobit
