// Times the CPU backend for each instruction set, on one thread and on all, beside an FMA product.
#include "bench/kernels/cpu.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "bench/kernels/fma_baseline.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/portable.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/thread_pool.h"

ABSL_FLAG(std::string, isa, "all",
          "cpu: portable, avx2, avx512, or all: avx2 and avx512, if this CPU has them");
ABSL_FLAG(int, threads, 0, "cpu: threads of the second measurement; 0: all of this machine");
ABSL_FLAG(double, seconds, 0.1, "cpu: time given to each figure");

namespace isobit::bench {
namespace {

struct Shape {
  int64_t n;
  int64_t k;
};
constexpr Shape kShapes[] = {{1536, 576}, {2048, 2048}, {4096, 4096}};
constexpr int64_t kRows[] = {1, 8, 64, 512};

// GMAC/s that one core must reach; 0: no target.
double TargetOf(cpu::Isa isa) {
  if (isa == cpu::Isa::kAvx512) return 8.0;
  return isa == cpu::Isa::kAvx2 ? 3.0 : 0.0;
}

// Operands of one shape: normal data, the weight packed both ways.
class Operands {
 public:
  Operands(const Backend& ops, const Shape& shape, int64_t m) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    x_.resize(static_cast<size_t>(m * shape.k));
    std::vector<Bf16> w(static_cast<size_t>(shape.n * shape.k));
    for (Bf16& value : x_) value = contract::FloatToBf16(normal(random));
    for (Bf16& value : w) value = contract::FloatToBf16(0.02f * normal(random));
    for (const Bf16 value : x_) x_fp32_.push_back(contract::Bf16ToFloat(value));
    y_.resize(static_cast<size_t>(m * shape.n));

    weight_.shape = {.n = shape.n,
                     .k = shape.k,
                     .num_leaves = contract::kLeaves,
                     .sum = contract::LeafSum::kChain};
    std::ranges::copy(contract::PlanColumns(shape.k).bounds, weight_.shape.bounds);
    packed_.resize(ops.packer().PackedBytes(weight_.shape) / sizeof(Line) + 1);
    ops.packer().Pack(weight_.shape, w.data(), shape.k, packed_.front().bytes);
    weight_.packed = packed_.front().bytes;

    panels_.resize(w.size() * sizeof(Bf16) / sizeof(Line));
    for (int64_t n = 0; n < shape.n; n += cpu::kPanelColumns) {
      cpu::PackPanel(w.data() + n * shape.k, shape.k, cpu::kPanelColumns, shape.k,
                     Panel(n / cpu::kPanelColumns));
    }
  }

  void RunOurs(Backend& ops, int64_t m) {
    const LinearShape& shape = weight_.shape;
    const absl::Status status = ops.Run(LinearArgs{.x = x_.data(),
                                                   .ldx = shape.k,
                                                   .m = m,
                                                   .weight = weight_,
                                                   .fp32_out = y_.data(),
                                                   .ldy = shape.n});
    ISOBIT_CHECK(status.ok()) << status.ToString();
  }

  void RunBaseline(FmaPanelFn panel, cpu::ThreadPool& pool, int64_t m) {
    const LinearShape& shape = weight_.shape;
    pool.ParallelFor(shape.n / cpu::kPanelColumns, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t p = begin; p < end; ++p) {
        panel(x_fp32_.data(), shape.k, m, Panel(p), shape.k, y_.data() + p * cpu::kPanelColumns,
              shape.n);
      }
    });
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  Bf16* Panel(int64_t p) {
    return reinterpret_cast<Bf16*>(panels_.front().bytes) +
           p * cpu::kPanelColumns * weight_.shape.k;
  }

  std::vector<Bf16> x_;
  std::vector<float> x_fp32_;
  std::vector<float> y_;
  LinearWeight weight_;
  std::vector<Line> packed_;
  std::vector<Line> panels_;
};

// The best rate of repeated calls within `seconds`, in 1e9 multiply-adds per second. The first
// call, which touches the memory first, counts only if it alone takes that long.
template <typename Body>
double BestRate(double macs, double seconds, const Body& body) {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  double spent = 0;
  for (int call = 0; spent < seconds || call < 2; ++call) {
    const Clock::time_point start = Clock::now();
    body();
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    spent += elapsed;
    if (call > 0 || elapsed > seconds) best = std::max(best, macs / elapsed / 1e9);
    if (call == 0 && elapsed > seconds) break;
  }
  return best;
}

void PrintTable(cpu::Isa isa, int threads, double seconds) {
  const std::unique_ptr<Backend> ops = MakeCpuBackend({.isa = isa, .num_threads = threads});
  cpu::ThreadPool pool(threads);
  const double target = TargetOf(isa) * threads;
  std::printf("\n%s, %d thread%s: Linear in GMAC/s\n", ops->name(), threads,
              threads == 1 ? "" : "s");
  std::printf("%6s %6s %6s %10s %10s %12s %8s\n", "N", "K", "M", "isobit", "target", "fp32 FMA",
              "ratio");
  for (const Shape& shape : kShapes) {
    Operands operands(*ops, shape, *std::ranges::max_element(kRows));
    for (const int64_t m : kRows) {
      const double macs = static_cast<double>(m) * static_cast<double>(shape.n * shape.k);
      const double ours = BestRate(macs, seconds, [&] { operands.RunOurs(*ops, m); });
      const double baseline =
          BestRate(macs, seconds, [&] { operands.RunBaseline(GetFmaPanel(isa), pool, m); });
      const std::string goal =
          target == 0 ? "-" : absl::StrCat(">= ", target, ours >= target ? "" : " !");
      std::printf("%6lld %6lld %6lld %10.2f %10s %12.2f %8.2f\n", static_cast<long long>(shape.n),
                  static_cast<long long>(shape.k), static_cast<long long>(m), ours, goal.c_str(),
                  baseline, ours / baseline);
      std::fflush(stdout);
    }
  }
}

}  // namespace

absl::Status BenchCpu() {
  const std::string name = absl::GetFlag(FLAGS_isa);
  std::vector<cpu::Isa> isas;
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    const bool wanted = name == "all" ? isa != cpu::Isa::kPortable : name == cpu::IsaName(isa);
    if (wanted && isa <= cpu::DetectIsa()) isas.push_back(isa);
  }
  if (isas.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--isa is '", name,
                                                   "', expected portable, or up to ",
                                                   std::string(cpu::IsaName(cpu::DetectIsa()))));
  }
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int threads = absl::GetFlag(FLAGS_threads) == 0 ? cores : absl::GetFlag(FLAGS_threads);
  const double seconds = absl::GetFlag(FLAGS_seconds);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("threads", threads, 1, 1024));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("seconds", seconds, 0.0, 60.0));
  for (const cpu::Isa isa : isas) {
    PrintTable(isa, 1, seconds);
    if (threads > 1) PrintTable(isa, threads, seconds);
  }
  return absl::OkStatus();
}

}  // namespace isobit::bench
