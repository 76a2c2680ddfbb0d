// The engine, its first weights, and the load.
#include "tools/null_engine.h"

#include <unistd.h>

#include <filesystem>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "tools/null_rank.h"
#include "tools/random_model.h"

namespace isobit::bench {

absl::Status LoadFirstWeights(Engine& engine, const std::string& model_path) {
  std::optional<absl::Status> loaded;
  engine.UpdateWeights(
      {.model_path = model_path},
      [&](const absl::StatusOr<WeightUpdateResult>& result) { loaded = result.status(); });
  while (!loaded) {
    engine.Step();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *loaded;
}

absl::StatusOr<std::unique_ptr<NullEngine>> NullEngine::Create(const NullEngineOptions& options) {
  ModelConfig config;
  config.num_layers = 1;
  config.hidden_size = 64;
  config.intermediate_size = 64;
  config.num_heads = 8;
  config.num_kv_heads = 8;
  config.head_dim = 8;
  config.vocab_size = 256;
  config.max_position_embeddings = kNullContext;
  config.rms_norm_eps = 1e-6f;
  config.tie_word_embeddings = true;
  config.eos_token_ids = {1};
  std::unique_ptr<NullEngine> made(new NullEngine);
  ISOBIT_RETURN_IF_ERROR(MakeDummyModel(config, 1, made->directory_ + "/model"));
  EngineOptions engine;
  engine.model_root = made->directory_;
  engine.load_format = LoadFormat::kDummy;
  engine.runner = {.tensor_parallel_size = options.tensor_parallel_size,
                   .page_size = 16,
                   .num_pages = 1 << 21,
                   .max_positions = kNullContext,
                   .time_steps = options.time_steps,
                   .make_rank = MakeNullRank(options.step_time, made->num_rows)};
  engine.scheduler = {.max_running = options.max_running, .max_batch_tokens = kNullContext};
  engine.max_waiting_tokens = int64_t{1} << 40;
  ISOBIT_ASSIGN_OR_RETURN(made->engine_, Engine::Create(config, engine));
  ISOBIT_RETURN_IF_ERROR(LoadFirstWeights(*made->engine_, "model"));
  return made;
}

NullEngine::NullEngine() {
  std::string name = std::filesystem::temp_directory_path() / "isobit_bench_XXXXXX";
  ISOBIT_CHECK(mkdtemp(name.data()) != nullptr) << name;
  directory_ = name;
}

NullEngine::~NullEngine() {
  engine_.reset();
  std::filesystem::remove_all(directory_);
}

Load::Load(Engine& engine, int64_t prompt, uint32_t max_tokens, MakeSink make_sink)
    : engine_(engine), prompt_(prompt), max_tokens_(max_tokens), make_sink_(std::move(make_sink)) {}

void Load::Fill(size_t streams) {
  for (; submitted_ - counts.done.load() < streams; ++submitted_) {
    GenerationRequest request;
    request.id = absl::StrCat(submitted_);
    request.prompt.assign(static_cast<size_t>(prompt_), 7);
    request.sampling.max_tokens = max_tokens_;
    request.sampling.ignore_eos = true;
    const auto ticket = engine_.Submit(std::move(request), make_sink_(counts));
    ISOBIT_CHECK(ticket.ok()) << ticket.status().ToString();
  }
}

}  // namespace isobit::bench
