// isobit-bench score: the scoring engine, without gRPC, on 1 .. N shards of a model with random
// weights, compared with cuBLAS's time for the same matrix products alone. Prints the digest of all
// scores, which must not depend on the number of shards, nor on whether completions of one prompt
// share its rows.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/model.h"
#include "bench/kernels/report.h"
#include "common/base/digest.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/model/model_plan.h"
#include "kernels/runtime/cuda_backend.h"
#include "trainer_bridge/scorer/scorer.h"

ABSL_FLAG(std::string, score_model, "qwen3-8b", "score: a model shape, by isobit-model's name");
ABSL_FLAG(int, score_layers, 0, "score: layers of the model, fewer to save time; 0: all");
ABSL_FLAG(std::vector<std::string>, shards, std::vector<std::string>({"1"}),
          "score: numbers of shards, one GPU each");
ABSL_FLAG(int64_t, score_tokens, 16384, "score: tokens of one rank in a pass");
ABSL_FLAG(int64_t, score_sequence, 1024, "score: tokens of a sequence");
ABSL_FLAG(int64_t, score_prompt, 0, "score: of these, tokens of the prompt; 0: a quarter");
ABSL_FLAG(
    int64_t, score_completions, 1,
    "score: sequences that have the same prompt; with more than one, every number of shards is "
    "timed without and with --prefix_sharing");
ABSL_FLAG(int64_t, score_prompts, 0,
          "score: different prompts that are timed; 0: as many as fill --score_passes");
ABSL_FLAG(int64_t, score_chunk_rows, 1024, "score: rows of logits that exist at one time");
ABSL_FLAG(int, score_passes, 4, "score: passes that are timed");

namespace isobit::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps the bits of all logprobs, by sequence.
class Digester final : public ScoreReceiver {
 public:
  explicit Digester(size_t count) : logprobs_(count) {}

  void OnScore(SequenceScore score) override {
    const std::lock_guard lock(mutex_);
    logprobs_[score.index] = std::move(score.completion.logprobs);
  }
  void OnDone(const absl::Status& status) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    changed_.notify_all();
  }
  bool CanTakeMore() const override { return true; }

  absl::StatusOr<std::string> Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return status_.has_value(); });
    ISOBIT_RETURN_IF_ERROR(*status_);
    std::string bytes;
    for (const std::vector<float>& row : logprobs_) {
      bytes.append(reinterpret_cast<const char*>(row.data()), row.size() * sizeof(float));
    }
    return Sha256Hex(bytes.data(), bytes.size());
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<float>> logprobs_;
  std::optional<absl::Status> status_;
};

// Tokens of a sequence that are its prompt.
int64_t PromptTokens() {
  const int64_t prompt = absl::GetFlag(FLAGS_score_prompt);
  return prompt > 0 ? prompt : absl::GetFlag(FLAGS_score_sequence) / 4;
}

// The same tokens for every number of shards.
std::vector<ScoreInput> Inputs(const ModelConfig& config, int64_t count) {
  const auto completions = static_cast<size_t>(absl::GetFlag(FLAGS_score_completions));
  const int64_t prompt = PromptTokens();
  const int64_t completion = absl::GetFlag(FLAGS_score_sequence) - prompt;
  std::mt19937_64 random(1);
  const auto tokens = [&](int64_t length) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    for (int32_t& id : ids) {
      id = static_cast<int32_t>(random() % static_cast<uint64_t>(config.vocab_size));
    }
    return ids;
  };
  std::vector<ScoreInput> inputs(static_cast<size_t>(count));
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i].prompt = i % completions == 0 ? tokens(prompt) : inputs[i - 1].prompt;
    inputs[i].completion = tokens(completion);
  }
  return inputs;
}

// Returns after the last pass has ended, which is a little after its last score.
absl::StatusOr<std::string> Score(Scorer& scorer, std::vector<ScoreInput> inputs) {
  int64_t tokens = scorer.work().tokens;
  for (const ScoreInput& input : inputs) tokens += input.num_tokens();
  const auto receiver = std::make_shared<Digester>(inputs.size());
  ISOBIT_RETURN_IF_ERROR(
      scorer.Submit(std::make_shared<ScoreJob>(std::move(inputs), ScoreOptions(), receiver)));
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, receiver->Wait());
  while (scorer.work().tokens < tokens) std::this_thread::sleep_for(std::chrono::microseconds(50));
  return digest;
}

// One matrix product of a pass, with its own memory.
struct Product {
  LinearShape shape;
  int64_t m = 0;
  Memory w, x, y;
};

absl::StatusOr<Product> MakeProduct(Backend& ops, LinearShape shape, int64_t m) {
  shape.gated = false;
  Product product;
  product.shape = shape;
  product.m = m;
  const size_t w_bytes = ops.packer().PackedBytes(shape);
  const size_t x_bytes = static_cast<size_t>(m * shape.k) * sizeof(Bf16);
  // Not zeros: with them a GPU draws less power and keeps a higher clock.
  std::vector<Bf16> values(std::max(w_bytes, x_bytes) / sizeof(Bf16));
  std::mt19937 random(2);
  for (Bf16& value : values) value = static_cast<Bf16>(0x3e00 | (random() & 0x81ff));
  ISOBIT_ASSIGN_OR_RETURN(product.w, ops.device().Allocate(w_bytes));
  ISOBIT_ASSIGN_OR_RETURN(product.x, ops.device().Allocate(x_bytes));
  ISOBIT_ASSIGN_OR_RETURN(product.y,
                          ops.device().Allocate(static_cast<size_t>(m * shape.n) * sizeof(Bf16)));
  ISOBIT_RETURN_IF_ERROR(ops.device().Copy(product.w.get(), values.data(), w_bytes));
  ISOBIT_RETURN_IF_ERROR(ops.device().Copy(product.x.get(), values.data(), x_bytes));
  ISOBIT_RETURN_IF_ERROR(ops.device().Synchronize());
  return product;
}

absl::Status Launch(Backend& ops, const Product& product) {
  return ops.Run(LinearArgs{.x = reinterpret_cast<const Bf16*>(product.x.get()),
                            .ldx = product.shape.k,
                            .m = product.m,
                            .weight = {product.shape, product.w.get()},
                            .bf16_out = reinterpret_cast<Bf16*>(product.y.get()),
                            .ldy = product.shape.n});
}

// Seconds that cuBLAS takes for the matrix products of one rank's pass. Repeats passes until the
// GPU is as warm as it gets while it scores.
absl::StatusOr<double> CublasSeconds(const ModelConfig& config, int64_t head_rows,
                                     int64_t chunk_rows) {
  const int64_t rows = absl::GetFlag(FLAGS_score_tokens);
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<CudaBackend> ops,
                          CudaBackend::Create({.mode = NumericsMode::kVanilla}));
  ISOBIT_ASSIGN_OR_RETURN(const RankShape shape, ShapeOfRank(config, 0, 1));
  std::vector<Product> layer;
  const ModelPlan plan(config);
  for (const size_t block : {1, 2}) {
    for (const Parameter& parameter : plan.parameters[block]) {
      if (parameter.op != ParameterOp::kLinear) continue;
      ISOBIT_ASSIGN_OR_RETURN(Product product, MakeProduct(*ops, LinearOf(parameter, shape), rows));
      layer.push_back(std::move(product));
    }
  }
  ISOBIT_ASSIGN_OR_RETURN(
      const Product head,
      MakeProduct(*ops, LinearOf(*FindParameter(plan.parameters.back(), "head"), shape),
                  chunk_rows));
  const auto pass = [&]() -> absl::Status {
    for (int i = 0; i < config.num_layers; ++i) {
      for (const Product& product : layer) ISOBIT_RETURN_IF_ERROR(Launch(*ops, product));
    }
    for (int64_t row = 0; row < head_rows; row += chunk_rows) {
      ISOBIT_RETURN_IF_ERROR(Launch(*ops, head));
    }
    return ops->device().Synchronize();
  };
  constexpr double kWarmSeconds = 1.0;
  for (const Clock::time_point start = Clock::now(); SecondsSince(start) < kWarmSeconds;) {
    ISOBIT_RETURN_IF_ERROR(pass());
  }
  const Clock::time_point start = Clock::now();
  int passes = 0;
  for (; SecondsSince(start) < kWarmSeconds; ++passes) ISOBIT_RETURN_IF_ERROR(pass());
  return SecondsSince(start) / passes;
}

struct Case {
  int shards = 1;
  bool sharing = true;
};

struct Result {
  double tokens_per_second;
  std::string digest;
};

// Times `count` sequences.
absl::StatusOr<Result> Run(const ModelConfig& config, const std::string& root, const Case& c,
                           int64_t count, int64_t chunk_rows) {
  const int shards = c.shards;
  const int64_t length = absl::GetFlag(FLAGS_score_sequence);
  std::vector<int> devices;
  for (int device = 0; device < shards; ++device) devices.push_back(device);
  ISOBIT_ASSIGN_OR_RETURN(const RankBackend backend,
                          MakeCudaBackend({.devices = devices, .num_shards = shards}));
  ScorerOptions options;
  options.model_root = root;
  options.load_format = LoadFormat::kDummy;
  options.num_shards = shards;
  options.max_batch_tokens = absl::GetFlag(FLAGS_score_tokens);
  options.chunk_rows = static_cast<size_t>(chunk_rows);
  options.prefix_sharing = c.sharing;
  options.backend = backend;
  const Clock::time_point load = Clock::now();
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Scorer> scorer,
                          Scorer::Load(std::move(options), kBenchModel));
  const double load_seconds = SecondsSince(load);
  const int64_t of_a_pass = absl::GetFlag(FLAGS_score_tokens) / length;
  ISOBIT_RETURN_IF_ERROR(Score(*scorer, Inputs(config, shards * of_a_pass)).status());
  const ScorerWork before = scorer->work();
  const Clock::time_point start = Clock::now();
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, Score(*scorer, Inputs(config, count)));
  const double seconds = SecondsSince(start);
  const ScorerWork after = scorer->work();
  const auto passes = static_cast<double>(after.passes - before.passes);
  const auto tokens = static_cast<double>(after.tokens - before.tokens);
  const auto shared = static_cast<double>(after.shared_tokens - before.shared_tokens);
  absl::PrintF("%6d  %7s  %9.0f  %8.3f  %6.3f  %6.0f  %8.1f  %9.1f  %6.1f  %s\n", shards,
               c.sharing ? "yes" : "no", tokens / seconds, seconds, 1 - shared / tokens, passes,
               static_cast<double>((after.passing - before.passing).count()) / 1000 / passes,
               static_cast<double>((after.gathering - before.gathering).count()) / 1000 / passes,
               load_seconds, digest.substr(0, 16));
  return Result{tokens / seconds, std::move(digest)};
}

absl::Status BenchModel(const ModelConfig& config, const std::string& root) {
  const int64_t rank_tokens = absl::GetFlag(FLAGS_score_tokens);
  const int64_t chunk_rows = absl::GetFlag(FLAGS_score_chunk_rows);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("score_tokens", rank_tokens, 8, 1 << 24));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("score_sequence", absl::GetFlag(FLAGS_score_sequence), 8, rank_tokens));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("score_chunk_rows", chunk_rows, 1, 1 << 24));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("score_passes", absl::GetFlag(FLAGS_score_passes), 1, 1000));
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> shard_counts,
                          Numbers("shards", absl::GetFlag(FLAGS_shards), 64));
  const int64_t most = *std::max_element(shard_counts.begin(), shard_counts.end());
  const int64_t length = absl::GetFlag(FLAGS_score_sequence);
  const int64_t completions = absl::GetFlag(FLAGS_score_completions);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("score_completions", completions, 1, 1 << 16));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("score_prompt", PromptTokens(), 1, length - 1));
  const int64_t prompts = absl::GetFlag(FLAGS_score_prompts);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("score_prompts", prompts, 0, 1 << 16));
  const int64_t count = prompts > 0
                            ? prompts * completions
                            : rank_tokens * most * absl::GetFlag(FLAGS_score_passes) / length;
  const int64_t head_rows = rank_tokens * (length - PromptTokens()) / length;
  ISOBIT_ASSIGN_OR_RETURN(const double cublas, CublasSeconds(config, head_rows, chunk_rows));
  const double cublas_rate = static_cast<double>(rank_tokens) / cublas;
  absl::PrintF(
      "%s, %d layers, %d tokens a rank and pass; %d sequences of %d + %d tokens, %d of a prompt\n",
      absl::GetFlag(FLAGS_score_model), config.num_layers, rank_tokens, count, PromptTokens(),
      length - PromptTokens(), completions);
  absl::PrintF("cuBLAS, the matrix products alone, one GPU: %.0f tokens/s\n", cublas_rate);
  absl::PrintF(
      "shards  sharing   tokens/s   seconds    rows  passes   ms/pass  gather ms  load s  digest "
      "of "
      "the logprobs\n");
  std::vector<Case> cases;
  for (const int64_t shards : shard_counts) {
    if (completions > 1) cases.push_back({static_cast<int>(shards), false});
    cases.push_back({static_cast<int>(shards), true});
  }
  std::vector<Result> results;
  for (const Case& c : cases) {
    ISOBIT_ASSIGN_OR_RETURN(Result result, Run(config, root, c, count, chunk_rows));
    results.push_back(std::move(result));
    const double rate = results.back().tokens_per_second;
    absl::PrintF("        %.3f of cuBLAS, a GPU; %.2f times the first line's rate%s\n",
                 rate / static_cast<double>(c.shards) / cublas_rate,
                 rate / results.front().tokens_per_second,
                 results.back().digest == results.front().digest ? "" : "; OTHER BITS");
  }
  for (const Result& result : results) {
    if (result.digest != results.front().digest) {
      return absl::InternalError("the bits depend on the number of shards or on sharing");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BenchScore() {
  return WithDummyModel(absl::GetFlag(FLAGS_score_model), absl::GetFlag(FLAGS_score_layers), 1,
                        BenchModel);
}

}  // namespace isobit::bench
