// Races as replays of CUDA graphs; the ceilings: a copy within the device, and cuBLAS at 8192^3.
#include "bench/kernels/harness.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/ops.h"

namespace isobit::bench {
namespace {

// A graph of a captured sequence of calls.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  }

  absl::Status Capture(const Contender& contender, int64_t calls, cudaStream_t stream,
                       const cuda::Card& card) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    absl::Status status;
    for (int64_t i = 0; i < calls && status.ok(); ++i) {
      status =
          contender.call(i, {.handle = stream, .dependent = contender.dependent, .card = &card});
    }
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    ISOBIT_RETURN_IF_ERROR(status);
    ISOBIT_RETURN_IF_CUDA_ERROR(ended);
    const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    ISOBIT_RETURN_IF_CUDA_ERROR(made);
    return absl::OkStatus();
  }

  absl::Status Replay(cudaStream_t stream) const {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(executable_, stream));
    return absl::OkStatus();
  }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// The version of NVIDIA's kernel driver; "?" if the system does not say it.
std::string DriverVersion() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  return file >> version ? version : "?";
}

}  // namespace

absl::Status CheckGpuSupport() { return absl::OkStatus(); }

absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) {
  void* memory = nullptr;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMalloc(&memory, std::max<size_t>(1, bytes)));
  DeviceMemory owner(static_cast<std::byte*>(memory));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemset(memory, 0, bytes));
  return owner;
}

double Median(std::vector<double> values) {
  const size_t middle = values.size() / 2;
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(middle));
  return values[middle];
}

double MedianRatio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return Median(ratios);
}

absl::StatusOr<std::unique_ptr<Harness>> Harness::Create() {
  std::unique_ptr<Harness> harness(new Harness);
  ISOBIT_ASSIGN_OR_RETURN(harness->device_, cuda::GetDeviceInfo(0));
  ISOBIT_ASSIGN_OR_RETURN(harness->card_, cuda::GetCard(0));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(0));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamCreate(&harness->stream_));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreate(&harness->begin_));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreate(&harness->end_));
  ISOBIT_ASSIGN_OR_RETURN(harness->cublas_, cuda::CublasLinear::Create(0));
  ISOBIT_RETURN_IF_ERROR(harness->MeasureCeilings());
  return harness;
}

Harness::~Harness() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::StatusOr<double> Harness::MicrosecondsSinceBegin() {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(end_, stream_));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(end_));
  float milliseconds = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, begin_, end_));
  return 1e3 * static_cast<double>(milliseconds);
}

absl::StatusOr<RaceTimes> Harness::Race(absl::Span<const Contender> contenders, int64_t calls,
                                        const RacePlan& plan) {
  const auto time = [&](const Graph& graph, int replays) -> absl::StatusOr<double> {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < replays; ++i) ISOBIT_RETURN_IF_ERROR(graph.Replay(stream_));
    ISOBIT_ASSIGN_OR_RETURN(const double elapsed, MicrosecondsSinceBegin());
    return elapsed / replays;
  };
  const size_t count = contenders.size();
  std::vector<Graph> graphs(count);
  std::vector<int> replays(count);
  for (size_t c = 0; c < count; ++c) {
    ISOBIT_RETURN_IF_ERROR(graphs[c].Capture(contenders[c], calls, stream_, card_));
    ISOBIT_RETURN_IF_ERROR(time(graphs[c], 1).status());  // loads the kernels
    ISOBIT_ASSIGN_OR_RETURN(const double once, time(graphs[c], 1));
    replays[c] = static_cast<int>(std::clamp(std::ceil(plan.slot_us / once), 1.0, 1000.0));
  }
  RaceTimes times(count);
  for (int round = 0; round < plan.rounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t c = (turn + static_cast<size_t>(round)) % count;
      ISOBIT_ASSIGN_OR_RETURN(const double elapsed, time(graphs[c], replays[c]));
      times[c].push_back(elapsed / static_cast<double>(calls));
    }
  }
  return times;
}

// The copy does not run in a graph: a graph's copy uses the copy engine, at two thirds of the rate.
absl::Status Harness::MeasureCeilings() {
  constexpr size_t kBytes = size_t{2} << 30;
  constexpr int64_t kSide = 8192;
  constexpr int kCopies = 9;
  ISOBIT_ASSIGN_OR_RETURN(const DeviceMemory from, RandomBf16(kBytes, 1, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(const DeviceMemory to, AllocateDevice(kBytes));
  std::vector<double> copies;
  for (int i = 0; i < kCopies; ++i) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(begin_, stream_));
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice, stream_));
    ISOBIT_ASSIGN_OR_RETURN(const double elapsed, MicrosecondsSinceBegin());
    copies.push_back(elapsed);
  }
  const LinearArgs args{.x = reinterpret_cast<const Bf16*>(from.get()),
                        .ldx = kSide,
                        .m = kSide,
                        .weight = {.shape = {.n = kSide, .k = kSide},
                                   .packed = from.get() + size_t{kSide * kSide} * sizeof(Bf16)},
                        .bf16_out = reinterpret_cast<Bf16*>(to.get()),
                        .ldy = kSide};
  const Contender product{.call = [&](int64_t, const cuda::Stream& stream) {
    return cublas_->Run(args, nullptr, stream);
  }};
  ISOBIT_ASSIGN_OR_RETURN(const RaceTimes products,
                          Race({&product, 1}, 2, {.rounds = 5, .slot_us = 2000}));
  copy_rate_ = 2.0 * kBytes / (Median(copies) * 1e-6);
  tensor_rate_ = 2.0 * kSide * kSide * kSide / (Median(products[0]) * 1e-6);
  return absl::OkStatus();
}

double Harness::Roofline(double bytes, double operations) const {
  return 1e6 * std::max(bytes / copy_rate_, operations / tensor_rate_);
}

std::string Harness::Describe() const {
  int runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  return absl::StrFormat(
      "%s, %d SMs, L2 %d MB; driver %s, CUDA %d.%d, cuBLAS %s\n"
      "ceilings: copy %.0f GB/s (2 GiB, read + written), tensor cores %.0f TFLOP/s (cuBLAS, "
      "8192^3)\n",
      device_.name, device_.num_sms, device_.l2_bytes >> 20, DriverVersion(), runtime / 1000,
      runtime / 10 % 100, cublas_->version(), copy_rate_ / 1e9, tensor_rate_ / 1e12);
}

}  // namespace isobit::bench
