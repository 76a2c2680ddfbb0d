// Compares Qkv and Attention, on every instruction set and thread count, with the scalar
// definition. Prefill, decode, page size and the contents of unwritten pages must change no bit.
#include "kernels/contract/attention.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/rope.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cpu/op_cases.h"

namespace isobit {
namespace {

using testing_support::AllCpuOptions;
using testing_support::Describe;
using testing_support::Family;
using testing_support::Guarded;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::SameBits;

struct Model {
  int32_t heads = 1;
  int32_t kv_heads = 1;
  int32_t head_dim = 16;
  int64_t window = 0;
  bool norm = false;

  int64_t q_columns() const { return int64_t{heads} * head_dim; }
  int64_t qkv_columns() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
};

// A paged cache whose unwritten slots are NaN. Pages are given out in descending order, so that
// neighbours in a sequence are not neighbours in memory.
class Cache {
 public:
  Cache(const Model& model, int32_t page_size, int64_t num_pages)
      : num_pages_(num_pages),
        k_(num_pages * model.kv_heads * page_size * model.head_dim),
        v_(num_pages * model.kv_heads * page_size * model.head_dim) {
    kv_ = {k_.data(), v_.data(), page_size, model.kv_heads, model.head_dim};
  }

  std::vector<int32_t> PagesFor(int64_t positions) {
    std::vector<int32_t> pages;
    for (int64_t p = 0; p < positions; p += kv_.page_size) {
      pages.push_back(static_cast<int32_t>(--num_pages_));
    }
    return pages;
  }
  const PagedKv& kv() const { return kv_; }
  const Guarded<Bf16>& k() const { return k_; }
  const Guarded<Bf16>& v() const { return v_; }

 private:
  int64_t num_pages_;
  Guarded<Bf16> k_;
  Guarded<Bf16> v_;
  PagedKv kv_;
};

// One call's view of some sequences.
struct Batch {
  std::vector<SequenceRows> sequences;
  int64_t rows = 0;
};

struct Result {
  std::vector<Bf16> qkv;  // after Qkv
  std::vector<Bf16> out;
};

// Qkv, then Attention.
Result Forward(Backend& ops, const Model& model, const Batch& batch, const PagedKv& kv,
               const std::vector<Bf16>& input) {
  int64_t positions = 0;
  for (const SequenceRows& s : batch.sequences) {
    positions = std::max(positions, s.first_position + s.num_rows);
  }
  const contract::RopeTable table = contract::MakeRopeTable(positions, model.head_dim, 10000.0, {});
  Random random(99);
  const std::vector<Bf16> q_norm = RandomBf16(Family::kNormal, model.head_dim, random);
  const std::vector<Bf16> k_norm = RandomBf16(Family::kNormal, model.head_dim, random);
  Result result{.qkv = input, .out = {}};
  EXPECT_TRUE(ops.Run(QkvArgs{.qkv = result.qkv.data(),
                              .ld = model.qkv_columns(),
                              .heads = model.heads,
                              .q_norm = model.norm ? q_norm.data() : nullptr,
                              .k_norm = model.norm ? k_norm.data() : nullptr,
                              .eps = 1e-6f,
                              .cosine = table.cosine.data(),
                              .sine = table.sine.data(),
                              .sequences = {.host = batch.sequences},
                              .kv = kv})
                  .ok());
  const int64_t ldo = model.q_columns() + 7;
  Guarded<Bf16> out(batch.rows * ldo);
  EXPECT_TRUE(ops.Run(AttentionArgs{.q = result.qkv.data(),
                                    .ldq = model.qkv_columns(),
                                    .heads = model.heads,
                                    .sequences = {.host = batch.sequences},
                                    .kv = kv,
                                    .scale = contract::AttentionScale(model.head_dim),
                                    .window = model.window,
                                    .out = out.data(),
                                    .ldo = ldo})
                  .ok());
  EXPECT_TRUE(out.GuardsIntact());
  result.out.assign(out.span().begin(), out.span().end());
  return result;
}

// Prefills sequences of the given lengths in one call.
struct Prefill {
  std::unique_ptr<Cache> cache;
  Result result;
};
Prefill RunPrefill(Backend& ops, const Model& model, const std::vector<int64_t>& lengths,
                   int32_t page_size, const std::vector<Bf16>& input) {
  int64_t pages = 3;  // never written
  for (const int64_t n : lengths) pages += (n + page_size - 1) / page_size;
  Prefill prefill{.cache = std::make_unique<Cache>(model, page_size, pages), .result = {}};
  Batch batch;
  std::vector<std::vector<int32_t>> tables;
  for (const int64_t n : lengths) tables.push_back(prefill.cache->PagesFor(n));
  for (size_t i = 0; i < lengths.size(); ++i) {
    batch.sequences.push_back({.first_row = batch.rows,
                               .num_rows = lengths[i],
                               .first_position = 0,
                               .pages = tables[i].data()});
    batch.rows += lengths[i];
  }
  prefill.result = Forward(ops, model, batch, prefill.cache->kv(), input);
  return prefill;
}

std::vector<Bf16> RandomInput(const Model& model, int64_t rows, uint64_t seed,
                              Family family = Family::kNormal) {
  Random random(seed);
  return RandomBf16(family, rows * model.qkv_columns(), random);
}

const std::vector<Model>& Models() {
  static const auto* const models = new std::vector<Model>{
      {.heads = 9, .kv_heads = 3, .head_dim = 64, .window = 0, .norm = false},
      {.heads = 2, .kv_heads = 2, .head_dim = 16, .window = 0, .norm = true},
      {.heads = 4, .kv_heads = 1, .head_dim = 24, .window = 40, .norm = true},
      {.heads = 3, .kv_heads = 1, .head_dim = 80, .window = 1, .norm = false},
      {.heads = 2, .kv_heads = 1, .head_dim = 128, .window = 0, .norm = true},
      {.heads = 1, .kv_heads = 1, .head_dim = 144, .window = 70, .norm = false},
      {.heads = 2, .kv_heads = 2, .head_dim = 256, .window = 0, .norm = false},
      {.heads = 1, .kv_heads = 1, .head_dim = 6, .window = 0, .norm = true},
      {.heads = 70, .kv_heads = 1, .head_dim = 16, .window = 0, .norm = false},
  };
  return *models;
}

std::string Describe(const Model& m) {
  return absl::StrCat("heads ", m.heads, "/", m.kv_heads, ", head_dim ", m.head_dim, ", window ",
                      m.window);
}

void ExpectOracleBits(const Model& model, const std::vector<int64_t>& lengths, int32_t page_size,
                      const std::vector<CpuOptions>& all, Family family = Family::kNormal) {
  int64_t rows = 0;
  for (const int64_t n : lengths) rows += n;
  const std::vector<Bf16> input = RandomInput(model, rows, 7, family);
  const std::unique_ptr<Backend> oracle = MakeOracleBackend();
  const Prefill expected = RunPrefill(*oracle, model, lengths, page_size, input);
  for (const CpuOptions& options : all) {
    SCOPED_TRACE(absl::StrCat(Describe(model), ", ", Describe(options)));
    const std::unique_ptr<Backend> ops = MakeCpuBackend(options);
    const Prefill actual = RunPrefill(*ops, model, lengths, page_size, input);
    EXPECT_TRUE(SameBits<Bf16>(actual.result.qkv, expected.result.qkv));
    EXPECT_TRUE(SameBits<Bf16>(actual.cache->k().span(), expected.cache->k().span()));
    EXPECT_TRUE(SameBits<Bf16>(actual.cache->v().span(), expected.cache->v().span()));
    EXPECT_TRUE(actual.cache->k().GuardsIntact() && actual.cache->v().GuardsIntact());
    EXPECT_TRUE(SameBits<Bf16>(actual.result.out, expected.result.out));
  }
}

TEST(AttentionTest, PrefillOfManyShapes) {
  for (const Model& model : Models()) ExpectOracleBits(model, {1, 37, 5}, 16, AllCpuOptions());
}

TEST(AttentionTest, WideExponentsAndZeros) {
  const Model model{.heads = 4, .kv_heads = 2, .head_dim = 32, .window = 0, .norm = false};
  ExpectOracleBits(model, {30, 9}, 8, AllCpuOptions(), Family::kWide);
  ExpectOracleBits(model, {30, 9}, 8, AllCpuOptions(), Family::kZeros);
}

TEST(AttentionTest, SeveralTiles) {
  const Model model{.heads = 2, .kv_heads = 1, .head_dim = 16, .window = 0, .norm = true};
  ExpectOracleBits(model, {300}, 16, {CpuOptions{}});
}

// A window that leaves whole tiles behind, and rows whose window ends on a tile's last key.
TEST(AttentionTest, WindowOverSeveralTiles) {
  for (const int64_t window : {1, 100, 129}) {
    const Model model{.heads = 2, .kv_heads = 1, .head_dim = 16, .window = window, .norm = false};
    ExpectOracleBits(model, {300, 2}, 16, {CpuOptions{}});
  }
}

TEST(AttentionTest, AnEarlierCallLeavesNothingBehind) {
  const Model model{.heads = 2, .kv_heads = 1, .head_dim = 24, .window = 0, .norm = false};
  const std::unique_ptr<Backend> ops = MakeCpuBackend({});
  const std::vector<Bf16> input = RandomInput(model, 20, 15);
  const Result alone = RunPrefill(*ops, model, {20}, 16, input).result;
  RunPrefill(*ops, model, {140}, 16, std::vector<Bf16>(140 * 4 * 24, 0x7fc0));
  EXPECT_TRUE(SameBits<Bf16>(RunPrefill(*ops, model, {20}, 16, input).result.out, alone.out));
}

// The next token of each of several sequences, in one call: the keys span up to three splits.
class DecodeTest : public testing::Test {
 protected:
  static constexpr int64_t kLengths[] = {1, 16, 130, 513, 1040};
  static constexpr int64_t kRows = 1 + 16 + 130 + 513 + 1040;

  // Prefills all but the last token of each sequence, then decodes the last ones.
  static Result Decode(Backend& ops, const Model& model, int32_t page_size,
                       const std::vector<Bf16>& input) {
    int64_t pages = 3;
    for (const int64_t n : kLengths) pages += (n + page_size - 1) / page_size;
    Cache cache(model, page_size, pages);
    Batch prompts;
    Batch step;
    std::vector<std::vector<int32_t>> tables;
    for (const int64_t n : kLengths) tables.push_back(cache.PagesFor(n));
    std::vector<Bf16> last;
    const int64_t columns = model.qkv_columns();
    for (size_t i = 0; i < tables.size(); ++i) {
      const int64_t n = kLengths[i];
      prompts.sequences.push_back({prompts.rows, n - 1, 0, tables[i].data()});
      step.sequences.push_back({step.rows++, 1, n - 1, tables[i].data()});
      prompts.rows += n;
      last.insert(last.end(), input.begin() + (prompts.rows - 1) * columns,
                  input.begin() + prompts.rows * columns);
    }
    Forward(ops, model, prompts, cache.kv(), input);
    return Forward(ops, model, step, cache.kv(), last);
  }
};

TEST_F(DecodeTest, HasTheOraclesBits) {
  const Model model{.heads = 3, .kv_heads = 1, .head_dim = 16, .window = 0, .norm = false};
  const std::vector<Bf16> input = RandomInput(model, kRows, 11);
  const std::unique_ptr<Backend> oracle = MakeOracleBackend();
  const Result expected = Decode(*oracle, model, 16, input);
  for (const CpuOptions& options : AllCpuOptions()) {
    SCOPED_TRACE(Describe(options));
    const std::unique_ptr<Backend> ops = MakeCpuBackend(options);
    EXPECT_TRUE(SameBits<Bf16>(Decode(*ops, model, 16, input).out, expected.out));
  }
}

TEST_F(DecodeTest, EqualsPrefillAtAnyPageSize) {
  for (const int64_t window : {0, 600}) {
    const Model model{.heads = 6, .kv_heads = 2, .head_dim = 64, .window = window, .norm = true};
    const std::vector<Bf16> input = RandomInput(model, kRows, 12);
    const std::unique_ptr<Backend> ops = MakeCpuBackend({});
    const Prefill prefill =
        RunPrefill(*ops, model, {std::begin(kLengths), std::end(kLengths)}, 16, input);
    const int64_t ldo = model.q_columns() + 7;
    std::vector<Bf16> expected;
    int64_t row = 0;
    for (const int64_t n : kLengths) {
      row += n;
      expected.insert(expected.end(), prefill.result.out.begin() + (row - 1) * ldo,
                      prefill.result.out.begin() + row * ldo);
    }
    for (const int32_t page_size : {1, 7, 16, 64, 2048}) {
      SCOPED_TRACE(absl::StrCat("window ", window, ", page size ", page_size));
      EXPECT_TRUE(SameBits<Bf16>(Decode(*ops, model, page_size, input).out, expected));
    }
  }
}

// The control: the sliding window and the last key do change bits.
TEST_F(DecodeTest, SeesItsKeys) {
  const Model full{.heads = 1, .kv_heads = 1, .head_dim = 16, .window = 0, .norm = false};
  const Model windowed{.heads = 1, .kv_heads = 1, .head_dim = 16, .window = 600, .norm = false};
  std::vector<Bf16> input = RandomInput(full, kRows, 13);
  const std::unique_ptr<Backend> ops = MakeCpuBackend({});
  const Result before = Decode(*ops, full, 16, input);
  EXPECT_FALSE(SameBits<Bf16>(Decode(*ops, windowed, 16, input).out, before.out));
  input.back() ^= 0x40;  // a fraction bit of the last token's value
  EXPECT_FALSE(SameBits<Bf16>(Decode(*ops, full, 16, input).out, before.out));
}

TEST(AttentionTest, NonFiniteValuesReachOnlyTheRowsThatSeeThem) {
  const Model model{.heads = 2, .kv_heads = 1, .head_dim = 16, .window = 0, .norm = false};
  constexpr int64_t kRows = 40;
  constexpr int64_t kPoisoned = 20;
  const std::vector<Bf16> clean = RandomInput(model, kRows, 14);
  std::vector<Bf16> poisoned = clean;
  poisoned[static_cast<size_t>(kPoisoned * model.qkv_columns()) + 3 * 16 + 5] = 0x7f80;  // a value
  for (const CpuOptions& options : AllCpuOptions()) {
    SCOPED_TRACE(Describe(options));
    const std::unique_ptr<Backend> oracle = MakeOracleBackend();
    const std::unique_ptr<Backend> ops = MakeCpuBackend(options);
    const Result expected = RunPrefill(*oracle, model, {kRows}, 16, poisoned).result;
    const Result actual = RunPrefill(*ops, model, {kRows}, 16, poisoned).result;
    EXPECT_TRUE(SameBits<Bf16>(actual.out, expected.out));
    const Result untouched = RunPrefill(*ops, model, {kRows}, 16, clean).result;
    const auto before = static_cast<size_t>(kPoisoned * (model.q_columns() + 7));
    EXPECT_TRUE(SameBits<Bf16>(std::span(actual.out).first(before),
                               std::span(untouched.out).first(before)));
    EXPECT_EQ(actual.out[before], 0x7fff);
  }
}

}  // namespace
}  // namespace isobit
