// A number for each distinct page and the one before it.
#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {

std::vector<int32_t> PageNumbers::Add(const ScoreInput& input) {
  const size_t num_prompt = input.prompt.size();
  const auto token = [&](size_t position) {
    return position < num_prompt ? input.prompt[position] : input.completion[position - num_prompt];
  };
  constexpr auto kSize = static_cast<size_t>(kScorePageSize);
  const auto num_tokens = static_cast<size_t>(input.num_tokens());
  std::vector<int32_t> numbers;
  numbers.reserve((num_tokens + kSize - 1) / kSize);
  Page page = {.before = -1, .tokens = {}};
  for (size_t first = 0; first < num_tokens; first += kSize) {
    int32_t number = count_;
    if (sharing_ && first + kSize <= num_tokens) {
      for (size_t i = 0; i < kSize; ++i) page.tokens[i] = token(first + i);
      number = numbers_.try_emplace(page, count_).first->second;
    }
    if (number == count_) ++count_;
    numbers.push_back(number);
    page.before = number;
  }
  return numbers;
}

}  // namespace isobit
