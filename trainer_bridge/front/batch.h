// The token rows of one training pass: whole sequences, one after the other, split into packs
// (C10). The Python versions are python/isobit/torch/batch.py and plan.py.
#ifndef ISOBIT_TRAINER_BRIDGE_FRONT_BATCH_H_
#define ISOBIT_TRAINER_BRIDGE_FRONT_BATCH_H_

#include <torch/types.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace isobit::front {

using Bounds = std::vector<int64_t>;

struct TrainingSequence {
  std::vector<int32_t> ids;
  int64_t prompt_length = 1;  // tokens that are not scored, at least 1
  // How the completion was drawn.
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
};

// One element per scored row; undefined if every row has the default.
struct RowSamplingTensors {
  torch::Tensor temperature;
  torch::Tensor top_k;
  torch::Tensor top_p;
  torch::Tensor min_p;
};

struct TrainingBatch {
  torch::Tensor ids;         // int32 [rows]; begins at 0 in each sequence
  torch::Tensor positions;   // int32 [rows], from 0 in each sequence
  Bounds sequences;          // row bounds
  torch::Tensor cu_seqlens;  // the same, int32
  Bounds packs;              // row bounds; the number of packs is a power of two
  torch::Tensor scored;      // int64 [scored rows]: rows whose next token is scored, ascending
  torch::Tensor targets;     // int32 [scored rows]
  Bounds scored_packs;       // bounds of the packs, counted in scored rows
  // For the embedding: which rows have which id, int32.
  torch::Tensor unique_ids;
  torch::Tensor starts;
  torch::Tensor rows_by_id;
  RowSamplingTensors sampling;
  int64_t max_length = 0;
  int64_t max_id = 0;
};

// packs: the number of sequences in each pack, in order; a power of two, at most 64, of packs,
// which may be empty. device: where the tensors will lie. INVALID_ARGUMENT says what was expected
// and what came.
absl::StatusOr<TrainingBatch> MakeBatch(absl::Span<const TrainingSequence> sequences,
                                        absl::Span<const int64_t> packs,
                                        torch::Device device = torch::kCPU);

// Cuts sequences of these lengths, in order, as C10 says. Returns for each slot the `packs` of its
// batch, one for each lane. A backward pass over each slot's batch, in order, leaves the step's
// gradient in grad(). INVALID_ARGUMENT: pack_tokens or a length is below 1, or lanes is not a power
// of two up to 64.
absl::StatusOr<std::vector<std::vector<int64_t>>> CutIntoSlots(absl::Span<const int64_t> lengths,
                                                               int64_t pack_tokens,
                                                               int64_t lanes = 8);

}  // namespace isobit::front

#endif  // ISOBIT_TRAINER_BRIDGE_FRONT_BATCH_H_
