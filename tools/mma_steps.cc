// Makes and compares the steps. See mma_steps.h.
#include "tools/mma_steps.h"

#include <algorithm>
#include <random>

#include "common/base/check.h"

namespace isobit {
namespace {

using contract::Bf16;
using contract::FromBits;
using contract::kMmaK;

class Random {
 public:
  explicit Random(uint64_t seed) : bits_(seed) {}

  uint32_t Bits() { return static_cast<uint32_t>(bits_() >> 32); }
  int Between(int low, int high) {  // both included
    return low + static_cast<int>(Bits() % static_cast<uint32_t>(high - low + 1));
  }
  // A normal number, or a subnormal if the exponent is -127, of random sign and mantissa.
  Bf16 Operand(int low_exponent, int high_exponent) {
    const auto field = static_cast<uint32_t>(Between(low_exponent, high_exponent) + 127);
    return static_cast<Bf16>((Bits() & 0x807fu) | (field << 7));
  }
  float Sum(int low_exponent, int high_exponent) {
    const auto field = static_cast<uint32_t>(Between(low_exponent, high_exponent) + 127);
    return FromBits((Bits() & 0x807fffffu) | (field << 23));
  }
  bool OneIn(uint32_t n) { return Bits() % n == 0; }
  Bf16 Zero() { return static_cast<Bf16>(Bits() & 0x8000u); }

 private:
  std::mt19937_64 bits_;
};

// The places of one tile.
struct Tile {
  Bf16* a;
  Bf16* b;
  float* c;

  template <class A, class B, class C>
  void Fill(A make_a, B make_b, C make_c) {
    std::generate(a, a + kOperandsPerTile, make_a);
    std::generate(b, b + kOperandsPerTile, make_b);
    std::generate(c, c + kStepsPerTile, make_c);
  }
  void FillExponents(Random& random, int low_a, int high_a, int low_b, int high_b, int low_c,
                     int high_c) {
    Fill([&] { return random.Operand(low_a, high_a); },
         [&] { return random.Operand(low_b, high_b); }, [&] { return random.Sum(low_c, high_c); });
  }
};

void NearOne(Random& random, Tile tile) { tile.FillExponents(random, -7, 0, -7, 0, -4, 4); }

void EveryExponent(Random& random, Tile tile) {
  tile.FillExponents(random, -127, 127, -127, 0, -127, 127);
}

void AnyBits(Random& random, Tile tile) {
  tile.Fill([&] { return static_cast<Bf16>(random.Bits()); },
            [&] { return static_cast<Bf16>(random.Bits()); },
            [&] { return FromBits(random.Bits()); });
}

// All terms below E's floor, with bits on both sides of the last that it keeps. A subnormal c,
// which counts with exponent -126, lifts some steps off it.
void BelowTheFloor(Random& random, Tile tile) {
  tile.FillExponents(random, -75, -73, -75, -73, 0, 0);
  std::generate(tile.c, tile.c + kStepsPerTile, [&] {
    return FromBits(random.Bits() & (random.OneIn(4) ? 0x8000000fu : 0x80000000u));
  });
}

void SubnormalResults(Random& random, Tile tile) {
  tile.FillExponents(random, -80, -60, -80, -60, -127, -120);
}

void SubnormalOperands(Random& random, Tile tile) {
  tile.FillExponents(random, -127, -127, -20, 127, -127, 0);
}

void Zeros(Random& random, Tile tile) {
  tile.Fill([&] { return random.OneIn(4) ? random.Operand(-127, 60) : random.Zero(); },
            [&] { return random.OneIn(2) ? random.Operand(-127, 60) : random.Zero(); },
            [&] {
              return random.OneIn(2) ? random.Sum(-127, 60) : FromBits(random.Bits() & (1u << 31));
            });
}

// The second half of the products takes away the first, but for some last bits.
void CancellingProducts(Random& random, Tile tile) {
  NearOne(random, tile);
  for (int row = 0; row < kTileRows; ++row) {
    for (int k = 0; k < kMmaK / 2; ++k) {
      Bf16* const a = tile.a + row * kMmaK + k;
      Bf16* const b = tile.b + row * kMmaK + k;
      a[kMmaK / 2] = static_cast<Bf16>(a[0] ^ (random.OneIn(8) ? 1u : 0u));
      b[kMmaK / 2] = static_cast<Bf16>(b[0] ^ 0x8000u);
    }
  }
  std::generate(tile.c, tile.c + kStepsPerTile, [&] { return random.Sum(-40, -8); });
}

// c takes away the sum of the products.
void CancellingSum(Random& random, Tile tile) {
  NearOne(random, tile);
  for (int i = 0; i < kStepsPerTile; ++i) {
    tile.c[i] =
        -contract::Mma16(0.0f, tile.a + i / kTileRows * kMmaK, tile.b + i % kTileRows * kMmaK);
  }
}

// Products at and below the last bits that a step keeps.
void Truncation(Random& random, Tile tile) { tile.FillExponents(random, -14, -11, -14, -11, 0, 1); }

// Terms over forty binades.
void Spread(Random& random, Tile tile) { tile.FillExponents(random, -20, 0, -20, 0, -40, 2); }

void Overflow(Random& random, Tile tile) { tile.FillExponents(random, 60, 64, 60, 64, 120, 127); }

void Infinities(Random& random, Tile tile) {
  const auto operand = [&] {
    if (random.OneIn(64)) return static_cast<Bf16>(0x7f80u | random.Zero());
    return random.OneIn(8) ? random.Zero() : random.Operand(-127, 127);
  };
  tile.Fill(operand, operand, [&] {
    return random.OneIn(16) ? FromBits(0x7f800000u | (random.Bits() & (1u << 31)))
                            : random.Sum(-127, 127);
  });
}

void Nans(Random& random, Tile tile) {
  const auto operand = [&] {
    return random.OneIn(128) ? static_cast<Bf16>(random.Bits() | 0x7f81u)
                             : random.Operand(-127, 127);
  };
  tile.Fill(operand, operand, [&] {
    return random.OneIn(64) ? FromBits(random.Bits() | 0x7f800001u) : random.Sum(-127, 127);
  });
}

struct Family {
  const char* name;
  void (*fill)(Random& random, Tile tile);
};
constexpr Family kFamilies[] = {{"near one", NearOne},
                                {"every exponent", EveryExponent},
                                {"any bits", AnyBits},
                                {"below the floor", BelowTheFloor},
                                {"subnormal results", SubnormalResults},
                                {"subnormal operands", SubnormalOperands},
                                {"zeros", Zeros},
                                {"cancelling products", CancellingProducts},
                                {"cancelling sum", CancellingSum},
                                {"truncation", Truncation},
                                {"spread", Spread},
                                {"overflow", Overflow},
                                {"infinities", Infinities},
                                {"nan", Nans}};
constexpr int64_t kNumFamilies = std::size(kFamilies);

}  // namespace

const contract::Bf16* MmaSteps::StepA(int64_t step) const {
  return a.data() + (step / kTileRows) * kMmaK;  // rows of all tiles are numbered through
}

const contract::Bf16* MmaSteps::StepB(int64_t step) const {
  return b.data() + (step / kStepsPerTile * kTileRows + step % kTileRows) * kMmaK;
}

const std::vector<std::string>& MmaFamilies() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Family& family : kFamilies) list.emplace_back(family.name);
    return list;
  }();
  return names;
}

MmaSteps MakeMmaSteps(int64_t steps, uint64_t seed) {
  const int64_t per_round = kNumFamilies * kStepsPerTile;
  const int64_t tiles = (steps + per_round - 1) / per_round * kNumFamilies;
  MmaSteps made;
  made.a.resize(static_cast<size_t>(tiles * kOperandsPerTile));
  made.b.resize(made.a.size());
  made.c.resize(static_cast<size_t>(tiles * kStepsPerTile));
  Random random(seed);
  for (int64_t t = 0; t < tiles; ++t) {
    kFamilies[t % kNumFamilies].fill(
        random, {made.a.data() + t * kOperandsPerTile, made.b.data() + t * kOperandsPerTile,
                 made.c.data() + t * kStepsPerTile});
  }
  return made;
}

std::vector<float> ContractResults(const MmaSteps& steps) {
  std::vector<float> results(steps.c.size());
  for (int64_t s = 0; s < steps.steps(); ++s) {
    const auto i = static_cast<size_t>(s);
    results[i] = contract::Mma16(steps.c[i], steps.StepA(s), steps.StepB(s));
  }
  return results;
}

MmaComparison CompareMmaSteps(const MmaSteps& steps, const std::vector<float>& expected,
                              const std::vector<float>& got) {
  ISOBIT_CHECK(expected.size() == steps.c.size() && got.size() == steps.c.size())
      << expected.size() << " and " << got.size() << " results of " << steps.c.size() << " steps";
  MmaComparison comparison;
  for (const std::string& name : MmaFamilies()) comparison.families.push_back({name});
  comparison.steps = steps.steps();
  for (int64_t s = 0; s < steps.steps(); ++s) {
    const auto i = static_cast<size_t>(s);
    auto& family = comparison.families[static_cast<size_t>(s / kStepsPerTile % kNumFamilies)];
    ++family.steps;
    if (contract::BitsOf(expected[i]) == contract::BitsOf(got[i])) continue;
    ++family.different;
    ++comparison.different;
    if (comparison.first) continue;
    const Bf16* const a = steps.StepA(s);
    const Bf16* const b = steps.StepB(s);
    comparison.first = {s,      family.name,    steps.c[i],    expected[i],
                        got[i], {a, a + kMmaK}, {b, b + kMmaK}};
  }
  return comparison;
}

}  // namespace isobit
