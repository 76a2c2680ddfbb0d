// Selection by block maxima: if the count-th largest maximum is t, at least `count` tokens are not
// below t. So only blocks with a maximum of at least t need to be searched.
#include "kernels/cpu/top_tokens.h"

#include <algorithm>
#include <functional>

#include "kernels/contract/attention.h"
#include "kernels/contract/portable.h"

namespace isobit::cpu {
namespace {

bool ComesFirst(const WeightedToken& a, const WeightedToken& b) { return a.key > b.key; }

}  // namespace

uint64_t KeyOf(float logit, int32_t id) {
  const uint32_t bits = contract::BitsOf(contract::Add(logit, 0.0f));  // -0 ties with +0
  const uint32_t ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ascending} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

int32_t IdOf(uint64_t key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key & 0xffffffffu));
}

void CollectFrom(const BlockedRow& row, float threshold, std::vector<WeightedToken>* out) {
  out->clear();
  for (int64_t b = 0; b < row.blocks(); ++b) {
    if (row.block_max[b] < threshold) continue;
    const int64_t end = std::min(row.vocab, (b + 1) * kVocabBlock);
    for (int64_t i = b * kVocabBlock; i < end; ++i) {
      if (row.z[i] >= threshold) out->push_back({KeyOf(row.z[i], static_cast<int32_t>(i)), 0});
    }
  }
}

void SelectTop(const BlockedRow& row, int64_t count, std::vector<float>* scratch,
               std::vector<WeightedToken>* out) {
  float threshold = contract::kMinusInfinity;
  if (count < row.blocks()) {
    scratch->assign(row.block_max, row.block_max + row.blocks());
    const auto nth = scratch->begin() + (count - 1);
    std::nth_element(scratch->begin(), nth, scratch->end(), std::greater<>());
    threshold = *nth;
  }
  CollectFrom(row, threshold, out);
  const int64_t last = std::min<int64_t>(count, static_cast<int64_t>(out->size())) - 1;
  std::nth_element(out->begin(), out->begin() + last, out->end(), ComesFirst);
  out->resize(static_cast<size_t>(last + 1));
}

WeightedToken NucleusEnd(std::vector<WeightedToken>& tokens, int64_t bound) {
  // Halves [begin, end), in which the prefix ends. before: the weight of all tokens ahead of it.
  auto begin = tokens.begin();
  auto end = tokens.end();
  int64_t before = 0;
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, ComesFirst);
    int64_t half = 0;
    for (auto it = begin; it != middle; ++it) half += it->weight;
    if (before + half >= bound) {
      end = middle;
    } else {
      before += half;
      begin = middle;
    }
  }
  return *begin;
}

}  // namespace isobit::cpu
