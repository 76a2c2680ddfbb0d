// Joins the ops of this folder into one backend.
#include "kernels/cpu/cpu_ops.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "kernels/contract/row_functions.h"
#include "kernels/contract/vanilla.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/log_probs.h"
#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/host_ops.h"

namespace isobit {
namespace {

using cpu::RowKernels;

constexpr int64_t kRowGrain = 4;          // rows of a row-wise op that are worth a thread's waking
constexpr int64_t kElementGrain = 16384;  // elements of a sum, likewise

// Elements [begin, end) of a sum by hops. The ring order changes where the message's chunks meet.
void HopReduce(const RowKernels& rows, const ReduceArgs& a, int64_t begin, int64_t end) {
  const int64_t chunk = (a.count + a.num_ranks - 1) / a.num_ranks;
  while (begin < end) {
    const bool ring = a.mode == NumericsMode::kVanilla;
    const int64_t stop = ring ? std::min(end, (begin / chunk + 1) * chunk) : end;
    const int first = ring ? contract::RingStart(begin, a.count, a.num_ranks) : 0;
    const float* order[contract::kLeaves];
    for (int hop = 0; hop < a.num_ranks; ++hop) {
      order[hop] = a.partials[(first + hop) % a.num_ranks] + begin;
    }
    rows.hop_sum(order, a.num_ranks, a.out + begin, stop - begin);
    begin = stop;
  }
}

class Packer final : public WeightPacker {
 public:
  size_t PackedBytes(const LinearShape& shape) const override {
    return cpu::PackedLayout(shape).bytes;
  }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    cpu::PackLinear(shape, w, ldw, packed);
  }
};

class CpuOps final : public HostOps {
 public:
  explicit CpuOps(const CpuOptions& options)
      : name_(absl::StrCat("cpu/", std::string(cpu::IsaName(options.isa)))),
        rows_(cpu::GetRowKernels(options.isa)),
        pool_(options.num_threads),
        linear_(cpu::GetMmaPanels(options.isa), rows_, pool_),
        attention_(cpu::GetMmaPanels(options.isa), rows_, pool_),
        log_probs_(rows_, pool_) {}

  const char* name() const override { return name_.c_str(); }

  const WeightPacker& packer() const override { return CpuWeightPacker(); }

  absl::Status Embedding(const EmbeddingArgs& a) override {
    for (int64_t r = 0; r < a.rows; ++r) {
      std::copy_n(a.table + a.ids[r] * a.hidden, a.hidden, a.out + r * a.hidden);
    }
    return absl::OkStatus();
  }

  absl::Status RmsNorm(const RmsNormArgs& a) override {
    pool_.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        Bf16* residual = a.residual + r * a.hidden;
        if (a.sum != nullptr) {
          rows_.add_residual(residual, a.sum + r * a.hidden, a.bias, a.hidden);
        }
        const float inverse =
            contract::InverseRms(rows_.sum_of_squares(residual, a.hidden), a.hidden, a.eps);
        rows_.normalise(residual, inverse, a.weight, a.out + r * a.hidden, a.hidden);
      }
    });
    return absl::OkStatus();
  }

  absl::Status SwiGlu(const SwiGluArgs& a) override {
    pool_.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        const Bf16* gate = a.gate_up + r * 2 * a.columns;
        rows_.swiglu(gate, gate + a.columns, a.out + r * a.columns, a.columns);
      }
    });
    return absl::OkStatus();
  }

  absl::Status Qkv(const QkvArgs& a) override {
    cpu::PrepareQkv(a, rows_, pool_);
    return absl::OkStatus();
  }

  absl::Status Attention(const AttentionArgs& a) override {
    attention_.Run(a);
    return absl::OkStatus();
  }

  absl::Status Reduce(const ReduceArgs& a) override {
    const bool hops = a.mode != NumericsMode::kTree && a.num_ranks > 1;
    pool_.ParallelFor(a.end - a.begin, kElementGrain, [&](int64_t begin, int64_t end, int) {
      begin += a.begin;
      end += a.begin;
      if (hops) {
        HopReduce(rows_, a, begin, end);
        return;
      }
      const float* partials[contract::kLeaves];
      for (int r = 0; r < a.num_ranks; ++r) partials[r] = a.partials[r] + begin;
      rows_.tree_sum(partials, a.num_ranks, a.out + begin, end - begin);
    });
    return absl::OkStatus();
  }

  absl::Status LogProbs(const LogProbArgs& a) override {
    log_probs_.Run(a);
    return absl::OkStatus();
  }

 protected:
  absl::Status Product(const LinearArgs& a) override {
    linear_.Run(a);
    return absl::OkStatus();
  }

 private:
  const std::string name_;
  const RowKernels& rows_;
  cpu::ThreadPool pool_;
  cpu::LinearOp linear_;
  cpu::AttentionOp attention_;
  cpu::LogProbsOp log_probs_;
};

}  // namespace

const WeightPacker& CpuWeightPacker() {
  static const Packer packer;
  return packer;
}

std::unique_ptr<Ops> MakeCpuOps(const CpuOptions& options) {
  ISOBIT_CHECK(options.isa <= cpu::DetectIsa())
      << "instruction set " << cpu::IsaName(options.isa) << ", this machine runs "
      << cpu::IsaName(cpu::DetectIsa());
  return std::make_unique<CpuOps>(options);
}

}  // namespace isobit
