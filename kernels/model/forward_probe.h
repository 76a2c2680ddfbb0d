// Observes op by op what a forward pass computes, so that two passes can be compared and the first
// op with different bits be found. The pass has one sequence, whose rows are its positions.
//
// Each op's result counts as the whole model's matrix [rows, columns], whatever columns a rank has.
// Its digest is a sum over elements, so the ranks' digests are added.
#ifndef ISOBIT_KERNELS_MODEL_FORWARD_PROBE_H_
#define ISOBIT_KERNELS_MODEL_FORWARD_PROBE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/opened_model.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/contract/portable.h"
#include "kernels/device.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/step_tables.h"

namespace isobit {

// In the order of computation. The inputs of each op are the results of earlier ops.
enum class ProbeOp {
  kEmbedding,     // layer 0
  kInputNorm,     // the norm before attention
  kQkv,           // the linear layers q, k and v with their biases: q heads, k heads, v heads
  kQ,             // queries, normalised and rotated
  kK,             // keys in the cache, normalised and rotated
  kV,             // values in the cache
  kAttention,     // before the linear layer o
  kAttentionSum,  // the residual after o
  kPostNorm,      // the norm before the MLP
  kGate,          // the linear layers gate and up. A pass does not store their results:
  kUp,            // they are computed a second time for the probe
  kActivation,    // gate and up through SwiGLU
  kMlpSum,        // the residual after down
  kFinalNorm,     // layer num_layers, like the logits
  kLogits,        // only of the last row
};

struct ProbeSite {
  int layer = 0;
  ProbeOp op = ProbeOp::kEmbedding;
  bool operator==(const ProbeSite&) const = default;
};

// What to report in addition to the digest of each op.
struct ProbeWanted {
  std::optional<ProbeSite> site{};  // report a digest of each of its rows
  std::optional<int64_t> row{};     // and the values of this row
};

struct ProbeReport {
  struct Digest {
    ProbeSite site;
    uint64_t digest = 0;
    bool operator==(const Digest&) const = default;
  };
  std::vector<Digest> digests;        // in the order of the computation
  std::vector<uint64_t> row_digests;  // of ProbeWanted::site; empty: not wanted
  std::vector<uint32_t> values;       // fp32 bits of ProbeWanted::row
  bool operator==(const ProbeReport&) const = default;
};

// A report, and the weights with which it was computed.
struct ProbeResult {
  ProbeReport report;
  WeightVersion version;
};

// The input of a probed pass: one sequence from its beginning, in pages 0, 1, ... of a cache of its
// own.
struct ProbePass {
  ProbePass(absl::Span<const int32_t> tokens, int32_t page_size);
  ProbePass(const ProbePass&) = delete;  // the sequence points to the pages
  ProbePass& operator=(const ProbePass&) = delete;

  std::vector<int32_t> ids;
  std::vector<int32_t> pages;
  SequenceRows sequence;
};

// One rank's view. Not thread-safe. Results are read from host memory, or from the device of
// ReadFrom; these methods then return the device's errors.
class ForwardProbe {
 public:
  // `shape` tells which heads and which columns of the logits this rank has.
  ForwardProbe(const ModelConfig& config, const RankShape& shape, const ProbeWanted& wanted);

  // From now on results are on `device`. `meet` is a barrier of the ranks. The rank calls it before
  // it waits for the ops, which may wait for other ranks, and again after it has read a result,
  // since other ranks may wait for its next op.
  void ReadFrom(Device& device, std::function<absl::Status()> meet) {
    device_ = &device;
    meet_ = std::move(meet);
  }

  // A result that every rank has in full. Rank 0's is reported, or that of a rank that differs.
  absl::Status SeeWhole(const ProbeSite& site, const Bf16* data, int64_t rows, int64_t columns);
  // Columns [from, from + count) of a rank's matrix are columns [first, first + count) of the whole
  // model's.
  struct Columns {
    int64_t from = 0;
    int64_t count = 0;
    int64_t first = 0;
  };
  // Columns of a matrix of `rows` rows with leading dimension ld.
  absl::Status SeeColumns(const ProbeSite& site, const Bf16* data, int64_t rows, int64_t ld,
                          absl::Span<const Columns> columns);
  // The keys and values of the pass's sequence.
  absl::Status SeeCache(int layer, const PagedKv& kv, const SequenceRows& sequence);
  // Only of row `row`.
  absl::Status SeeLogits(const float* logits, int64_t row);

  // Merges the views of all ranks of a pass, given in the order of the ranks.
  static ProbeReport Merge(absl::Span<const ForwardProbe> ranks);

 private:
  // A slice of a site's matrix.
  struct Part {
    int64_t first_row = 0, rows = 0, first_column = 0, columns = 0;
  };
  // bits_of(row, column): fp32 bits; both count from the slice's begin.
  template <typename BitsOf>
  void Take(const ProbeSite& site, const Part& part, const BitsOf& bits_of, bool is_whole = false);
  // Calls look(host memory with the `elements` elements at `data`).
  template <typename T, typename Look>
  absl::Status Fetch(const T* data, int64_t elements, const Look& look);
  // Adds the rows and values of the wanted site from the ranks that are reported.
  static void AddRows(absl::Span<const ForwardProbe* const> parts, ProbeReport& report);

  const RankShape shape_;
  const int num_layers_;
  const ProbeWanted wanted_;
  Device* device_ = nullptr;  // null: results are in host memory
  std::function<absl::Status()> meet_;
  std::vector<std::byte> fetched_;
  struct Seen {
    ProbeReport::Digest digest;
    bool is_whole = false;  // reported by SeeWhole
  };
  std::vector<Seen> seen_;  // one per site
  std::vector<uint64_t> row_digests_;
  std::vector<std::optional<uint32_t>> values_;  // by column; unset for columns of other ranks
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_FORWARD_PROBE_H_
