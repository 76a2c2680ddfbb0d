// isobit-bench: measures how fast the kernels are on this machine, compared with baselines.
#include <cstdio>
#include <string>

#include "bench/kernels/cpu.h"
#include "bench/kernels/gpu.h"
#include "bench/services/engine.h"
#include "bench/services/metrics.h"
#include "common/config/flags.h"

namespace isobit::bench {
namespace {

constexpr char kUsage[] =
    "isobit-bench cpu|engine|metrics|gemm|grad|attention|ops|allreduce|decode|score [flags]\n\n"
    "cpu        Linear on the CPU, for each instruction set, on one thread and on all, beside a "
    "plain\n"
    "           fp32 FMA product over the same bf16 weights.\n"
    "engine     What a step costs the rollout's host code, and what gRPC costs, over "
    "ranks that\n"
    "           compute nothing.\n"
    "metrics    What a step's metrics cost, over such ranks, beside a model's steps.\n"
    "gemm       Linear on a GPU beside cuBLAS, over the layers of --models at --tp and --m.\n"
    "grad       The ops of a training step beside cuBLAS or the copy rate, by --families.\n"
    "attention  Decode beside the copy rate, prefill beside --baseline.\n"
    "ops        The row-wise ops, logprobs and sampling beside the copy rate.\n"
    "allreduce  The sum over ranks, fused with RMSNorm, beside NCCL's.\n"
    "decode     The rollout's ranks: a decode step and what it is made of, and prefill.\n"
    "score      The scorer on GPUs, by number of shards, beside cuBLAS's matrix products alone.\n\n"
    "A baseline runs in the same process, in turn with ours. '!' marks a figure below its target. "
    "A "
    "flag's\n"
    "help begins with the subcommands that read it.";

struct Subcommand {
  const char* name;
  bool needs_gpu;
  absl::Status (*run)();
};
constexpr Subcommand kSubcommands[] = {
    {"cpu", false, BenchCpu},         {"engine", false, BenchEngine},
    {"metrics", false, BenchMetrics}, {"gemm", true, BenchGemm},
    {"grad", true, BenchGrad},        {"attention", true, BenchAttention},
    {"ops", true, BenchOps},          {"allreduce", true, BenchAllReduce},
    {"decode", true, BenchDecode},    {"score", true, BenchScore}};

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "isobit-bench: %s\n", status.ToString().c_str());
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

int Main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  for (const Subcommand& subcommand : kSubcommands) {
    if (name != subcommand.name) continue;
    if (subcommand.needs_gpu && !CheckGpuSupport().ok()) return ExitCode(CheckGpuSupport());
    ParseFlagsOrExit(argc - 1, argv + 1, kUsage);
    return ExitCode(subcommand.run());
  }
  ParseFlagsOrExit(argc, argv, kUsage);
  std::fprintf(stderr,
               "isobit-bench: expected a subcommand: cpu, engine, metrics, gemm, grad, attention, "
               "ops, allreduce, "
               "decode or score\n");
  return 2;
}

}  // namespace
}  // namespace isobit::bench

int main(int argc, char** argv) { return isobit::bench::Main(argc, argv); }
