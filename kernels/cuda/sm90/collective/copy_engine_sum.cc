// The layout of a rank's shared memory, its copies, and the waits between ranks.
#include "kernels/cuda/sm90/collective/copy_engine_sum.h"

#include <cuda.h>

#include "absl/strings/str_cat.h"
#include "common/base/rank_count.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/driver_function.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {
namespace {

constexpr int kHalves = 2;
constexpr int kLegs = 2;

size_t Aligned(size_t bytes) { return RoundUp(bytes, 256); }

// The shared memory of one rank: counts, [half][phase][kMaxRanks]; mailboxes, [half][ranks], each
// for a run of fp32 rows; and each half's rows in bf16.
struct Layout {
  Layout(const CopyEngineSumOptions& options, int ranks) {
    const int64_t run = CeilDiv(options.max_rows, ranks);
    mailboxes = Aligned(kHalves * kLegs * kMaxRanks * sizeof(uint32_t));
    mailbox = Aligned(static_cast<size_t>(run * options.hidden) * sizeof(float));
    rows = mailboxes + static_cast<size_t>(kHalves * ranks) * mailbox;
    rows_of_half = Aligned(static_cast<size_t>(options.max_rows * options.hidden) * sizeof(Bf16));
    end = rows + kHalves * rows_of_half;
  }
  size_t mailboxes, mailbox, rows, rows_of_half, end;
};

const auto& GetBatchMemOp() {
  static const auto function =
      FindDriverFunction<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  return function;
}

}  // namespace

size_t CopyEngineSum::SharedBytes(const CopyEngineSumOptions& options, int ranks) {
  return Layout(options, ranks).end;
}

absl::StatusOr<std::unique_ptr<CopyEngineSum>> CopyEngineSum::Create(
    const CopyEngineSumOptions& options, int rank, int ranks, const PeerMemory& memory,
    ThreadBarrier& barrier, PeerAllReduce& waits, const Stream& stream) {
  if (options.hidden < 1 || options.max_rows < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a sum over ranks by copy engines of up to ",
                                                   options.max_rows, " rows of ", options.hidden,
                                                   " columns: expected at least one of each"));
  }
  ISOBIT_RETURN_IF_ERROR(GetBatchMemOp().status());
  std::unique_ptr<CopyEngineSum> sum(
      new CopyEngineSum(options, rank, ranks, memory, barrier, waits, stream));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&sum->copies_, cudaStreamNonBlocking));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&sum->ready_, cudaEventDisableTiming));
  return sum;
}

CopyEngineSum::~CopyEngineSum() {
  if (ready_ != nullptr) cudaEventDestroy(ready_);
  if (copies_ != nullptr) cudaStreamDestroy(copies_);
}

uint32_t* CopyEngineSum::Counts(int of, int half, Leg leg) const {
  return reinterpret_cast<uint32_t*>(memory_.of_rank(of)) + (half * kLegs + leg) * kMaxRanks;
}

float* CopyEngineSum::Mailbox(int of, int half, int from) const {
  const Layout layout(options_, ranks_);
  return reinterpret_cast<float*>(memory_.of_rank(of) + layout.mailboxes +
                                  static_cast<size_t>(half * ranks_ + from) * layout.mailbox);
}

Bf16* CopyEngineSum::Rows(int of, int half) const {
  const Layout layout(options_, ranks_);
  return reinterpret_cast<Bf16*>(memory_.of_rank(of) + layout.rows +
                                 static_cast<size_t>(half) * layout.rows_of_half);
}

absl::Status CopyEngineSum::Push(int half, Leg leg,
                                 const std::function<cudaError_t(int, cudaStream_t)>& copy) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventRecord(ready_, stream_.handle));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamWaitEvent(copies_, ready_, 0));
  CUstreamBatchMemOpParams counts[kMaxRanks] = {};
  for (int d = 1; d < ranks_; ++d) {  // the ranks begin with different peers
    const int q = (rank_ + d) % ranks_;
    ISOBIT_RETURN_IF_CUDA_ERROR(copy(q, copies_));
    auto& write = counts[d - 1].writeValue;
    write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.address = reinterpret_cast<CUdeviceptr>(Counts(q, half, leg) + rank_);
    write.value = halves_[half].number;
    write.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // every reader sees the copies first
  }
  const CUresult result =
      (*GetBatchMemOp().value())(copies_, static_cast<unsigned>(ranks_ - 1), counts, 0);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("cuStreamBatchMemOp: error ", result));
  }
  met_ = false;
  return absl::OkStatus();
}

absl::Status CopyEngineSum::WaitForRanks() {
  if (met_) return absl::OkStatus();
  met_ = true;
  return barrier_.Wait(rank_, options_.timeout, [this] { return waits_.Check(); });
}

absl::Status CopyEngineSum::Send(int half, const float* partial, int64_t rows) {
  if (rows > options_.max_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("a sum over ranks of ", rows, " rows: expected at most ", options_.max_rows));
  }
  halves_[half] = {.partial = partial, .rows = rows, .number = halves_[half].number + 1};
  return Push(half, kPartials, [&](int q, cudaStream_t stream) {
    const int64_t begin = FirstRow(q, rows);
    const int64_t elements = (FirstRow(q + 1, rows) - begin) * options_.hidden;
    return cudaMemcpyAsync(Mailbox(q, half, rank_), partial + begin * options_.hidden,
                           static_cast<size_t>(elements) * sizeof(float), cudaMemcpyDefault,
                           stream);
  });
}

absl::Status CopyEngineSum::Sum(int half, const RmsNormArgs& norm) {
  const Half& h = halves_[half];
  if (norm.hidden != options_.hidden || norm.rows != h.rows) {
    return absl::InvalidArgumentError(absl::StrCat("a sum over ranks of ", norm.rows, " rows of ",
                                                   norm.hidden, " columns: expected the ", h.rows,
                                                   " rows sent, of ", options_.hidden));
  }
  const int64_t first = FirstRow(rank_, h.rows);
  const int64_t rows = FirstRow(rank_ + 1, h.rows) - first;
  const int64_t begin = first * norm.hidden;
  const int64_t elements = rows * norm.hidden;
  ISOBIT_RETURN_IF_ERROR(WaitForRanks());
  ISOBIT_RETURN_IF_ERROR(waits_.Await(Counts(rank_, half, kPartials), h.number, stream_));
  const float* partials[kMaxRanks] = {};
  for (int q = 0; q < ranks_; ++q) {
    partials[q] = q == rank_ ? h.partial + begin : Mailbox(rank_, half, q);
  }
  RmsNormArgs own = norm;
  own.residual += begin;
  own.out = Rows(rank_, half) + begin;
  own.rows = rows;
  ISOBIT_RETURN_IF_ERROR(LaunchRmsNormOfPartials(own, partials, ranks_, stream_));
  return Push(half, kRows, [&](int q, cudaStream_t stream) {
    return cudaMemcpyAsync(Rows(q, half) + begin, own.out,
                           static_cast<size_t>(elements) * sizeof(Bf16), cudaMemcpyDefault, stream);
  });
}

absl::StatusOr<const Bf16*> CopyEngineSum::Receive(int half) {
  ISOBIT_RETURN_IF_ERROR(WaitForRanks());
  ISOBIT_RETURN_IF_ERROR(waits_.Await(Counts(rank_, half, kRows), halves_[half].number, stream_));
  return Rows(rank_, half);
}

}  // namespace isobit::cuda
