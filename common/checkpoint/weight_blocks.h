// Weights that lie in GPU memory of other processes: which block of which tensor lies where. A
// tensor is a matrix here; a vector has one column.
#ifndef ISOBIT_COMMON_CHECKPOINT_WEIGHT_BLOCKS_H_
#define ISOBIT_COMMON_CHECKPOINT_WEIGHT_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/safetensors.h"

namespace isobit {

// Some rows and columns of a tensor.
struct WeightBlock {
  size_t tensor = 0;  // its number in a list
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_column = 0;
  int64_t num_columns = 0;
  size_t holder = 0;       // the memory that holds it, its number in a list
  uint64_t offset = 0;     // bytes from the memory's begin to the block's first value
  int64_t row_stride = 0;  // values from row to row
};

struct WeightBlocks {
  std::vector<std::string> handles;  // CUDA IPC handles of the holders
  std::vector<WeightBlock> blocks;
};

// OK if the blocks hold each value of the tensors exactly once. INVALID_ARGUMENT, naming the tensor
// or the block's number: they do not; a block that lies outside its tensor, of a holder that is not
// listed, that does not begin at a whole value, or whose rows overlap; more than 4,096 blocks of
// one tensor.
absl::Status ValidateBlocks(const WeightBlocks& blocks, const std::vector<Tensor>& tensors);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_WEIGHT_BLOCKS_H_
