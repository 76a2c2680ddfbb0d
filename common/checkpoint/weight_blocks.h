// Weights in other processes' GPU memory: where each block of each tensor lies. They are read by
// CUDA IPC or sent by NCCL. A tensor counts as a matrix here; a vector has one column.
#ifndef ISOBIT_COMMON_CHECKPOINT_WEIGHT_BLOCKS_H_
#define ISOBIT_COMMON_CHECKPOINT_WEIGHT_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
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
  size_t holder = 0;       // its memory's number in a list, or the sender's rank
  uint64_t offset = 0;     // bytes from the memory's begin to the first value; if sent: 0
  int64_t row_stride = 0;  // values from one row to the next
};

// Processes that send their blocks by NCCL.
struct BlockSenders {
  std::vector<std::string> group_ids{};  // NCCL's, one for each rank that receives
  int num_senders = 0;
  bool has_joined = false;  // the groups, in an earlier update
  int64_t nccl_version = 0;
};

struct WeightBlocks {
  std::vector<std::string> handles{};     // CUDA IPC handles of the memories that hold the blocks
  std::optional<BlockSenders> senders{};  // instead: who sends them
  std::vector<WeightBlock> blocks{};
  size_t num_holders() const {
    return senders ? static_cast<size_t>(senders->num_senders) : handles.size();
  }
};

// OK if the blocks hold each value of the tensors exactly once. INVALID_ARGUMENT, naming the tensor
// or the block's number: they do not; a block that lies outside its tensor, of a holder that is not
// listed, that does not begin at a whole value, or whose rows overlap; more than 4,096 blocks of
// one tensor; not 1 to 65,536 senders.
absl::Status ValidateBlocks(const WeightBlocks& blocks, const std::vector<Tensor>& tensors);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_WEIGHT_BLOCKS_H_
