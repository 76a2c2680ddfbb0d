// Makes the CPU backend's table of ops. Each family of ops has a file of its own.
#include "kernels/cpu/cpu_backend.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "kernels/cpu/context.h"
#include "kernels/host_kernels.h"

namespace isobit {
namespace cpu {
namespace {

class Packer final : public WeightPacker {
 public:
  size_t PackedBytes(const LinearShape& shape) const override { return PackedLayout(shape).bytes; }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    PackLinear(shape, w, ldw, packed);
  }
};

class CpuBackend final : public HostBackend {
 public:
  explicit CpuBackend(const CpuOptions& options)
      : name_(absl::StrCat("cpu/", std::string(IsaName(options.isa)))), context_(options) {
    Fill(context_);
  }
  const char* name() const override { return name_.c_str(); }
  const WeightPacker& packer() const override { return CpuWeightPacker(); }

 private:
  const std::string name_;
  Context context_;
};

}  // namespace

Context::Context(const CpuOptions& options)
    : mode(options.mode),
      rows(GetRowKernels(options.isa)),
      pool(options.num_threads),
      linear(GetMmaPanels(options.isa), rows, pool),
      attention(GetMmaPanels(options.isa), rows, pool),
      log_probs(rows, pool),
      products(GetMmaPanels(options.isa), rows, pool),
      attention_gradient(GetMmaPanels(options.isa), rows, pool) {}

absl::Status Run(const PolicyLossArgs& a, Context& /*context*/) { return RunOnHost(a); }
absl::Status Run(const LossFunctionArgs& a, Context& /*context*/) { return RunOnHost(a); }
absl::Status Run(const TreeSumArgs& a, Context& /*context*/) { return RunOnHost(a); }
absl::Status Run(const SequenceSumsArgs& a, Context& /*context*/) { return RunOnHost(a); }

}  // namespace cpu

const WeightPacker& CpuWeightPacker() {
  static const cpu::Packer packer;
  return packer;
}

std::unique_ptr<Backend> MakeCpuBackend(const CpuOptions& options) {
  ISOBIT_CHECK(options.isa <= cpu::DetectIsa())
      << "instruction set " << cpu::IsaName(options.isa) << ", this machine runs "
      << cpu::IsaName(cpu::DetectIsa());
  return std::make_unique<cpu::CpuBackend>(options);
}

}  // namespace isobit
