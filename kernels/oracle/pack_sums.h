// Sums over token rows in scalar form (C10, C11): over the rows of a pack, and over the packs of a
// pass.
#ifndef ISOBIT_KERNELS_ORACLE_PACK_SUMS_H_
#define ISOBIT_KERNELS_ORACLE_PACK_SUMS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/ops/packs.h"

namespace isobit::oracle {

// The sum over all packs; pack_sum(begin, end) is the sum of rows [begin, end).
template <typename PackSum>
float SumOverPacks(PackBounds packs, PackSum pack_sum) {
  contract::TreeSum tree;
  for (size_t p = 0; p + 1 < packs.size(); ++p) tree.Push(pack_sum(packs[p], packs[p + 1]));
  return tree.Total();
}

// C11's column sum of term(row) over rows [begin, end).
template <typename Term>
float ColumnSum(int64_t begin, int64_t end, Term term) {
  float sum = 0.0f;
  for (int64_t first = begin; first < end; first += contract::kColumnSumRows) {
    float block = 0.0f;
    for (int64_t r = first; r < std::min(first + contract::kColumnSumRows, end); ++r) {
      block = contract::Add(block, term(r));
    }
    sum = contract::Add(sum, block);  // +0 + block is block, which is never -0
  }
  return sum;
}

}  // namespace isobit::oracle

#endif  // ISOBIT_KERNELS_ORACLE_PACK_SUMS_H_
