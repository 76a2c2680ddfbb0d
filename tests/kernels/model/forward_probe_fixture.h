// A pass of a tiny model that a probe sees, on any number of ranks and any backend, with or without
// a fault of the arithmetic.
#ifndef ISOBIT_TESTS_KERNELS_MODEL_FORWARD_PROBE_FIXTURE_H_
#define ISOBIT_TESTS_KERNELS_MODEL_FORWARD_PROBE_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_directory.h"
#include "common/parallel/thread_group.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/gather_all_reduce.h"
#include "kernels/growing_buffer.h"
#include "kernels/model/forward_probe.h"
#include "kernels/model/numerics.h"
#include "kernels/model/resident_weights.h"
#include "kernels/model/transformer.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/prepare_blocks.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"

namespace isobit {

// Each plants one fault in the second layer, by the number of calls that an op has had.
class FaultyOps final : public testing_support::ForwardingBackend {
 public:
  static constexpr int32_t kPageSize = 4;
  enum class Fault { kNone, kScale, kPosition, kPage, kNorm, kActivation, kModesSum };

  FaultyOps(std::unique_ptr<Backend> ops, Fault fault)
      : ForwardingBackend(std::move(ops)), fault_(fault) {
    Replace<QkvArgs>(*this);
    Replace<AttentionArgs>(*this);
    Replace<ReduceArgs>(*this);
    Replace<RmsNormArgs>(*this);
    Replace<LinearArgs>(*this);
  }

  absl::Status On(const QkvArgs& args) {
    QkvArgs changed = args;
    std::vector<SequenceRows> sequences(args.sequences.host.begin(), args.sequences.host.end());
    if (fault_ == Fault::kPosition && num_qkv_++ == 1) {
      // Rotates by the next position. The place in the cache moves, too, which may need a page
      // more.
      sequences.front().first_position += 1;
      pages_ = PagesOf(sequences.front());
      pages_.push_back(pages_.front());
      sequences.front().pages = pages_.data();
      changed.sequences.host = sequences;
    }
    return inner().Run(changed);
  }

  absl::Status On(const AttentionArgs& args) {
    AttentionArgs changed = args;
    std::vector<SequenceRows> sequences(args.sequences.host.begin(), args.sequences.host.end());
    const bool is_second = num_attention_++ == 1;
    if (fault_ == Fault::kScale && is_second) changed.scale *= 1.0009765625f;
    if (fault_ == Fault::kPage && is_second) {
      // Reads the second page twice, as if the first were another sequence's.
      pages_ = PagesOf(sequences.front());
      pages_.front() = pages_[1];
      sequences.front().pages = pages_.data();
      changed.sequences.host = sequences;
    }
    return inner().Run(changed);
  }

  absl::Status On(const ReduceArgs& args) {
    if (fault_ == Fault::kModesSum && num_sums_++ == 2) return mode_->Run(args);
    return inner().Run(args);
  }

  absl::Status On(const RmsNormArgs& args) {
    RmsNormArgs changed = args;
    if (fault_ == Fault::kNorm && num_norms_++ == 2) changed.eps *= 4;
    return inner().Run(changed);
  }

  absl::Status On(const LinearArgs& args) {
    const absl::Status done = inner().Run(args);
    if (fault_ == Fault::kActivation && args.swiglu_out != nullptr && num_activations_++ == 1) {
      args.swiglu_out[5] ^= 1;  // the last bit of one element
    }
    return done;
  }

 private:
  static std::vector<int32_t> PagesOf(const SequenceRows& sequence) {
    return {sequence.pages, sequence.pages + (sequence.num_rows + kPageSize - 1) / kPageSize};
  }

  const Fault fault_;
  // Of whose ops one takes the place of the contract's, on CPUs.
  const std::unique_ptr<Backend> mode_ = MakeCpuBackend({.mode = NumericsMode::kVanilla});
  int num_qkv_ = 0, num_attention_ = 0, num_norms_ = 0, num_activations_ = 0, num_sums_ = 0;
  std::vector<int32_t> pages_;
};

class ForwardProbeFixture : public ::testing::Test {
 protected:
  using Fault = FaultyOps::Fault;
  ForwardProbeFixture() {
    testing_support::WriteTinyModel(testing_support::TinyConfig(Architecture::kQwen3), 5,
                                    dir_.path());
    config_ = *LoadModelConfig(dir_.path());
  }

  using MakeOps = std::function<std::unique_ptr<Backend>()>;

  // What a pass sees on `size` ranks of make_ops_, with a fault on the last one.
  ProbeReport Probe(int size, const ProbeWanted& wanted = {}, Fault fault = Fault::kNone) const {
    return ProbeOf(make_ops_, size, wanted, fault);
  }
  ProbeReport ProbeOf(const MakeOps& make_ops, int size, const ProbeWanted& wanted = {},
                      Fault fault = Fault::kNone) const {
    ThreadGroup group(size);
    const ProbePass pass(kTokens, FaultyOps::kPageSize);
    std::vector<ForwardProbe> probes;
    for (int r = 0; r < size; ++r)
      probes.emplace_back(config_, *ShapeOfRank(config_, r, size), wanted);
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        FaultyOps ops(make_ops(), r == size - 1 ? fault : Fault::kNone);
        Run(pass, *ShapeOfRank(config_, r, size), ops, group.rank(r),
            probes[static_cast<size_t>(r)]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ForwardProbe::Merge(probes);
  }

  void Run(const ProbePass& pass, const RankShape& shape, Backend& ops, Communicator& comm,
           ForwardProbe& probe) const {
    const Checkpoint checkpoint = *Checkpoint::Open(dir_.path());
    const WeightLayout layout(config_, shape, ops.packer());
    const auto weights = *ResidentWeights::Create(layout, ops.device());
    ISOBIT_ASSERT_OK(weights->Commit(
        testing_support::PrepareBlocks(checkpoint, "", {weights.get()})->ranks.blocks.front()));
    const contract::RopeTable rope = RopeTableOf(config_, 64);
    GatherAllReduce all_reduce(ops, comm);
    Transformer transformer(layout, rope, ops, shape.size > 1 ? &all_reduce : nullptr);
    const KvCache cache = *KvCache::Create(config_, shape,
                                           {.num_pages = static_cast<int32_t>(pass.pages.size()),
                                            .page_size = FaultyOps::kPageSize,
                                            .shared = true},
                                           ops.device());
    const Batch batch = {.ids = pass.ids, .sequences = {pass.sequence}};
    const auto rows = static_cast<int64_t>(pass.ids.size());
    GrowingBuffer<Bf16> hidden;
    GrowingBuffer<float> logits;
    ISOBIT_ASSERT_OK(hidden.Reserve(ops.device(), rows * config_.hidden_size));
    ISOBIT_ASSERT_OK(logits.Reserve(ops.device(), shape.vocab.size()));
    ISOBIT_ASSERT_OK(transformer.PrepareProbe(rows));
    if (!ops.device().is_host()) {
      probe.ReadFrom(ops.device(), [&comm] { return comm.Barrier(); });
    }
    transformer.SetProbe(&probe);
    ISOBIT_ASSERT_OK(transformer.Forward(batch, *weights, cache, hidden.data()));
    ISOBIT_ASSERT_OK(transformer.Logits(hidden.data() + (rows - 1) * config_.hidden_size, 1,
                                        *weights, logits.data(), shape.vocab.size()));
    ISOBIT_ASSERT_OK(probe.SeeLogits(logits.data(), rows - 1));
    // Until here other ranks may read this one's partial sums.
    ISOBIT_EXPECT_OK(comm.Barrier());
  }

  // The first site that differs; {-1, ...}: none.
  static ProbeSite FirstDifference(const ProbeReport& a, const ProbeReport& b) {
    EXPECT_EQ(a.digests.size(), b.digests.size());
    for (size_t i = 0; i < a.digests.size(); ++i) {
      EXPECT_EQ(a.digests[i].site, b.digests[i].site);
      if (a.digests[i].digest != b.digests[i].digest) return a.digests[i].site;
    }
    return {.layer = -1};
  }

  static inline const std::vector<int32_t> kTokens = {3, 7, 2, 9, 4, 4, 8, 5, 6, 2, 3};
  MakeOps make_ops_ = [] { return MakeCpuBackend(CpuOptions()); };
  const testing_support::TempDir dir_;
  ModelConfig config_;
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_KERNELS_MODEL_FORWARD_PROBE_FIXTURE_H_
