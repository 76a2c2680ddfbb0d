// The numerics fingerprint: hashes constants, probes of every contract function, mode and model.
// See fingerprint.h.
#include "kernels/contract/fingerprint.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/digest.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/log_prob.h"
#include "kernels/contract/mma16.h"
#include "kernels/contract/noise.h"
#include "kernels/contract/rope.h"
#include "kernels/contract/row_functions.h"
#include "kernels/contract/sampling.h"

namespace isobit::contract {
namespace {

std::string Constants() {
  return absl::StrCat("version=", kContractVersion, " mma_k=", kMmaK,
                      " mma_bits=", kMmaFractionBits, " mma_min=", kMmaMinExponent,
                      " leaves=", kLeaves, " unit=", kLeafUnit, " norm_leaf=", kNormLeaf,
                      " kv_tile=", KvTile(128), "/", KvTile(256), " split=", kSplit,
                      " lanes=", kRowSumLanes, " weight_bits=", kWeightBits,
                      " philox=", kPhiloxRounds, " log2e=", BitsOf(kLog2E));
}

// A digest of what the functions return, the same on every machine that keeps the contract.
std::string Probes() {
  std::vector<uint32_t> bits;
  const auto push = [&bits](float x) { bits.push_back(BitsOf(x)); };
  for (int i = 0; i < 512; ++i) {
    const PhiloxBlock random = TokenNoise(7, 1, 2, static_cast<uint32_t>(i));
    for (const uint32_t word : random.words) push(Gumbel(word));
    const float x = static_cast<float>(random.words[0]) * 0x1p-32f;
    push(Exp2(x * -100.0f));
    push(Log(x * 1000.0f));
    push(Sigmoid(x * 8.0f - 4.0f));
    push(Penalise(x, true, i, 1.25f, 0.5f, 0.125f));
    Bf16 a[kMmaK];
    Bf16 b[kMmaK];
    for (int k = 0; k < kMmaK; ++k) {
      const PhiloxBlock pair =
          TokenNoise(11, static_cast<uint32_t>(k), 3, static_cast<uint32_t>(i));
      a[k] = static_cast<Bf16>(pair.words[0] & 0xbfffu);  // |a| < 2, any exponent below
      b[k] = static_cast<Bf16>((pair.words[1] & 0x83ffu) | 0x3c00u);
    }
    push(Mma16(x, a, b));
    push(SumOfSquares(b, kMmaK - i % 4));
    SoftmaxRow row;
    float scores[16];
    for (int k = 0; k < kMmaK; ++k) scores[k] = Bf16ToFloat(b[k]) * 100.0f;
    push(UpdateSoftmax(row, scores, kMmaK, 0.125f));
    SplitSum folded{0.25f, 1.5f};
    push(FoldAccumulator(x, 1.0f, Fold(folded, FinishSplit(row, 0.125f))));
    push(folded.sum);
    const VocabSum sum = Combine(RangeSum(x, TokenWeight(x, 1.0f), TokenWeightedDistance(x, 1.0f)),
                                 {0.5f, 1.25f, -0.5f});
    push(LogProb(x, sum));
    push(Entropy(sum));
  }
  for (const RopeScaling::Type type : {RopeScaling::Type::kLlama3, RopeScaling::Type::kYarn}) {
    const RopeTable table = MakeRopeTable(
        64, 16, 10000.0, {.type = type, .factor = 8.0, .original_max_positions = 32.0});
    for (const float value : table.cosine) push(value);
    for (const float value : table.sine) push(value);
  }
  return Sha256Hex(bits.data(), bits.size() * sizeof(uint32_t));
}

}  // namespace

std::string Fingerprint(absl::string_view mode, absl::string_view model) {
  static const std::string* const kContract =
      new std::string(absl::StrCat(Constants(), "\nprobes=", Probes()));
  const std::string text =
      absl::StrCat("isobit numerics\n", *kContract, "\nmode=", mode, "\nmodel=", model);
  return Sha256Hex(text.data(), text.size());
}

}  // namespace isobit::contract
