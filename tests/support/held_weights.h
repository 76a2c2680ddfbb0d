// A model's tensors as a trainer's processes hold them: cut into blocks, in several memories, with
// gaps between rows.
#ifndef ISOBIT_TESTS_SUPPORT_HELD_WEIGHTS_H_
#define ISOBIT_TESTS_SUPPORT_HELD_WEIGHTS_H_

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/weight_blocks.h"

namespace isobit::testing_support {

struct HeldWeights {
  std::vector<Tensor> tensors;                 // sorted by name, without data
  WeightBlocks blocks;                         // a handle is the number of its memory
  std::vector<std::vector<std::byte>> memory;  // [holder]
  absl::Status ends_with{};                    // of holders that send: what becomes of their group
};

// How tensors are cut and stored. dtype: bf16 values are also those of the other types, but for
// values that fp16 lacks, which become others.
struct HoldingRules {
  int row_parts = 1;     // as FSDP cuts, a holder for each
  int column_parts = 1;  // of matrices whose columns are a multiple of 4 * column_parts
  int64_t gap = 0;       // values between rows
  DType dtype = DType::kBf16;
  bool apart = false;  // a memory for each block instead, as allocators give to large ones
};

inline HeldWeights Hold(const TensorSource& source, const HoldingRules& rules) {
  HeldWeights held;
  if (!rules.apart) {
    held.memory.resize(static_cast<size_t>(rules.row_parts) *
                       static_cast<size_t>(rules.column_parts));
  }
  const size_t item = ItemSize(rules.dtype);
  for (size_t t = 0; t < source.tensors().size(); ++t) {
    Tensor tensor = source.tensors()[t];
    std::vector<uint16_t> values(tensor.NumElements());
    static_cast<void>(source.Read(t, 0, values.size() * sizeof(uint16_t),
                                  reinterpret_cast<uint8_t*>(values.data())));
    tensor.dtype = rules.dtype;
    tensor.size_bytes = values.size() * item;
    held.tensors.push_back(tensor);
    const int64_t rows = tensor.shape[0];
    const int64_t columns = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
    const bool cut_columns = columns % (4 * rules.column_parts) == 0;
    const int64_t width = cut_columns ? columns / rules.column_parts : columns;
    const int64_t height = (rows + rules.row_parts - 1) / rules.row_parts;
    size_t holder = rules.apart ? held.memory.size() : 0;
    for (int64_t row = 0; row < rows; row += height) {
      for (int64_t column = 0; column < columns; column += width, ++holder) {
        if (rules.apart) held.memory.emplace_back();
        std::vector<std::byte>& memory = held.memory[holder];
        // Any whole value may be the first.
        memory.resize(memory.size() + item);
        const WeightBlock block = {.tensor = t,
                                   .first_row = row,
                                   .num_rows = std::min(height, rows - row),
                                   .first_column = column,
                                   .num_columns = width,
                                   .holder = holder,
                                   .offset = memory.size(),
                                   .row_stride = width + rules.gap};
        memory.resize(memory.size() +
                      static_cast<size_t>(block.num_rows * block.row_stride) * item);
        for (int64_t r = 0; r < block.num_rows; ++r) {
          for (int64_t c = 0; c < width; ++c) {
            const uint16_t value = values[static_cast<size_t>((row + r) * columns + column + c)];
            uint32_t bits = uint32_t{value} << 16;
            if (rules.dtype == DType::kBf16) bits = value;
            if (rules.dtype == DType::kF16) bits = value & 0x3fff;  // finite, and subnormal too
            std::memcpy(
                memory.data() + block.offset + static_cast<size_t>(r * block.row_stride + c) * item,
                &bits, item);
          }
        }
        held.blocks.blocks.push_back(block);
      }
    }
  }
  for (size_t holder = 0; holder < held.memory.size(); ++holder) {
    held.blocks.handles.push_back(std::to_string(holder));
  }
  return held;
}

// The same tensors whole, as host memory holds them, to pack and sum as files are.
class HeldSource final : public TensorSource {
 public:
  explicit HeldSource(const HeldWeights& held) : held_(held) { tensors_ = held.tensors; }
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    const size_t item = ItemSize(tensors_[tensor].dtype);
    const int64_t columns = tensors_[tensor].shape.size() > 1 ? tensors_[tensor].shape[1] : 1;
    for (size_t at = first; at < first + size; at += item, out += item) {
      const auto value = static_cast<int64_t>(at / item);
      const int64_t row = value / columns;
      const int64_t column = value % columns;
      for (const WeightBlock& block : held_.blocks.blocks) {
        const int64_t r = row - block.first_row;
        const int64_t c = column - block.first_column;
        if (block.tensor != tensor || r < 0 || r >= block.num_rows || c < 0 ||
            c >= block.num_columns) {
          continue;
        }
        std::memcpy(out,
                    held_.memory[block.holder].data() + block.offset +
                        static_cast<size_t>(r * block.row_stride + c) * item,
                    item);
        break;
      }
    }
    return absl::OkStatus();
  }

 private:
  const HeldWeights& held_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_HELD_WEIGHTS_H_
