// The exchange over peer memory and the one over NCCL.
#include "kernels/runtime/rank_exchange.h"

#include <utility>

#include "common/base/status_macros.h"

namespace isobit {
namespace {

using AllRanks = std::array<const std::byte*, kMaxRanks>;

class PeerExchange final : public RankExchange {
 public:
  PeerExchange(const PeerBuffers& buffers, int rank, int num_ranks, cuda::PeerAllReduce* peers,
               const cuda::Stream& stream)
      : buffers_(buffers), rank_(rank), num_ranks_(num_ranks), peers_(peers), stream_(stream) {}

  std::byte* own(ExchangeBuffer buffer) const override { return memory(buffer).of_rank(rank_); }

  absl::StatusOr<AllRanks> Share(ExchangeBuffer buffer, size_t /*bytes*/) override {
    ISOBIT_RETURN_IF_ERROR(peers_->Barrier(stream_));
    AllRanks all = {};
    for (int r = 0; r < num_ranks_; ++r) all[static_cast<size_t>(r)] = memory(buffer).of_rank(r);
    return all;
  }

 private:
  const PeerMemory& memory(ExchangeBuffer buffer) const {
    return buffers_[static_cast<size_t>(buffer)];
  }

  const PeerBuffers& buffers_;
  const int rank_;
  const int num_ranks_;
  cuda::PeerAllReduce* const peers_;
  const cuda::Stream& stream_;
};

class NcclExchange final : public RankExchange {
 public:
  NcclExchange(NcclGroup& nccl, int num_ranks, const cuda::Stream& stream)
      : nccl_(nccl), num_ranks_(num_ranks), stream_(stream) {}

  absl::Status Allocate(const ExchangeBytes& bytes, CudaDevice& device) {
    for (size_t b = 0; b < kExchangeBuffers; ++b) {
      ISOBIT_ASSIGN_OR_RETURN(own_[b], device.Allocate(bytes[b]));
      ISOBIT_ASSIGN_OR_RETURN(all_[b], device.Allocate(static_cast<size_t>(num_ranks_) * bytes[b]));
    }
    return absl::OkStatus();
  }

  std::byte* own(ExchangeBuffer buffer) const override {
    return own_[static_cast<size_t>(buffer)].get();
  }

  absl::StatusOr<AllRanks> Share(ExchangeBuffer buffer, size_t bytes) override {
    std::byte* const gathered = all_[static_cast<size_t>(buffer)].get();
    ISOBIT_RETURN_IF_ERROR(nccl_.AllGather(own(buffer), gathered, bytes, stream_.handle));
    AllRanks all = {};
    for (size_t r = 0; r < static_cast<size_t>(num_ranks_); ++r) all[r] = gathered + r * bytes;
    return all;
  }

 private:
  NcclGroup& nccl_;
  const int num_ranks_;
  const cuda::Stream& stream_;
  std::array<Memory, kExchangeBuffers> own_;
  std::array<Memory, kExchangeBuffers> all_;  // [ranks][bytes]
};

}  // namespace

std::unique_ptr<RankExchange> MakePeerExchange(const PeerBuffers& buffers, int rank, int num_ranks,
                                               cuda::PeerAllReduce* peers,
                                               const cuda::Stream& stream) {
  return std::make_unique<PeerExchange>(buffers, rank, num_ranks, peers, stream);
}

absl::StatusOr<std::unique_ptr<RankExchange>> MakeNcclExchange(const ExchangeBytes& bytes,
                                                               NcclGroup& nccl, int num_ranks,
                                                               CudaDevice& device) {
  auto exchange = std::make_unique<NcclExchange>(nccl, num_ranks, device.stream());
  ISOBIT_RETURN_IF_ERROR(exchange->Allocate(bytes, device));
  return exchange;
}

}  // namespace isobit
