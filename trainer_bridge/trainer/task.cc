// The task share.
#include "trainer_bridge/trainer/task.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"

namespace isobit::trainer {
namespace {

// For any model, also a random one: the share of tokens in the first quarter of the vocabulary.
class Share : public Task {
 public:
  explicit Share(int64_t vocab_size) : vocab_size_(vocab_size) {}

  std::vector<int32_t> Prompt(int64_t number) const override {
    std::mt19937_64 random(static_cast<uint64_t>(number));  // the same with every library
    std::vector<int32_t> tokens(kPromptTokens);
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab_size_));
    }
    return tokens;
  }

  double Reward(int64_t /*number*/, absl::Span<const int32_t> completion) const override {
    const auto wanted = std::count_if(completion.begin(), completion.end(),
                                      [this](int32_t token) { return token < vocab_size_ / 4; });
    return static_cast<double>(wanted) / static_cast<double>(completion.size());
  }

 private:
  static constexpr size_t kPromptTokens = 8;

  const int64_t vocab_size_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Task>> MakeTask(const std::string& name, int64_t vocab_size) {
  if (name == "share") return std::make_unique<Share>(vocab_size);
  return absl::InvalidArgumentError(absl::StrCat("--task: expected share, got ", name));
}

}  // namespace isobit::trainer
