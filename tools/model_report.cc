// Writes the report. See model_report.h.
#include "tools/model_report.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/contract/constants.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/numerics.h"

namespace isobit {
namespace {

void AppendSummary(const ModelConfig& config, const TensorSource& checkpoint,
                   const CheckpointDigests& digests, const std::string& stored_digest,
                   std::string& report) {
  uint64_t bytes = 0;
  for (const Tensor& tensor : checkpoint.tensors()) bytes += tensor.size_bytes;
  absl::StrAppend(&report, ArchitectureName(config.architecture), ", ",
                  NumParameters(ModelPlan(config)), " parameters, ", bytes, " bytes, context ",
                  config.max_position_embeddings, "\n\n", config.CanonicalString(), "\n");
  absl::StrAppendFormat(&report, "%-28s%s\n", "digest", digests.checkpoint);
  absl::StrAppendFormat(&report, "%-28s%s\n", "SHA-256 of stored bytes", stored_digest);
  for (const NumericsMode mode :
       {NumericsMode::kTree, NumericsMode::kBatchInvariant, NumericsMode::kVanilla}) {
    absl::StrAppendFormat(&report, "%-28s%s\n",
                          absl::StrCat("fingerprint ", NumericsModeName(mode)),
                          FingerprintOf(config, mode));
  }
}

void AppendTensors(const TensorSource& checkpoint, const CheckpointDigests& digests,
                   std::string& report) {
  absl::StrAppend(&report, "\ntensors: dtype, shape, digest, name\n");
  for (const Tensor& tensor : checkpoint.tensors()) {
    absl::StrAppendFormat(&report, "  %-5s%-16s%s  %s\n", SafetensorsName(tensor.dtype),
                          ShapeString(tensor.shape), digests.tensors.at(tensor.name).digest,
                          tensor.name);
  }
}

void AppendPlan(const char* what, const contract::LeafPlan& plan, std::string& report) {
  absl::StrAppendFormat(&report, "  %-36s%s\n", what, absl::StrJoin(plan.bounds, " "));
}

std::string Range(const Interval& interval) {
  return absl::StrCat("[", interval.begin, ", ", interval.end, ")");
}

void AppendLeaves(const ModelConfig& config, std::string& report) {
  const int64_t columns_per_kv = int64_t{config.num_heads} / config.num_kv_heads * config.head_dim;
  absl::StrAppend(&report, "\nleaf bounds, in columns\n");
  AppendPlan("hidden (qkv, gate_up, lm_head)", contract::PlanColumns(config.hidden_size), report);
  AppendPlan("attention output (o_proj)",
             contract::PlanKvHeads(config.num_kv_heads, columns_per_kv), report);
  AppendPlan("intermediate (down_proj)", contract::PlanColumns(config.intermediate_size), report);
  AppendPlan("vocabulary (rows of lm_head)", contract::PlanColumns(config.vocab_size), report);

  const Parameter gate_up = *FindParameter(ModelPlan(config).parameters[2], "gate_up");
  absl::StrAppend(&report, "\nranks: KV heads, query heads, intermediate, vocabulary\n");
  for (int size = 1; size <= contract::kLeaves; size *= 2) {
    for (int rank = 0; rank < size; ++rank) {
      const RankShape shape = ShapeOfRank(config, rank, size).value();
      absl::StrAppendFormat(
          &report, "  TP %d rank %d  %-10s%-5d%-16s%s\n", size, rank, Range(shape.kv_heads),
          shape.heads, Range(SliceOf(gate_up, gate_up.tensors[0], shape).rows), Range(shape.vocab));
    }
  }
}

}  // namespace

std::string ReportModel(const ModelConfig& config, const TensorSource& checkpoint,
                        const CheckpointDigests& digests, const std::string& stored_digest) {
  std::string report;
  AppendSummary(config, checkpoint, digests, stored_digest, report);
  AppendTensors(checkpoint, digests, report);
  AppendLeaves(config, report);
  return report;
}

}  // namespace isobit
