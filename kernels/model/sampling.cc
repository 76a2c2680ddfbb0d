// Builds sampling rows from parameters and history. See sampling.h.
#include "kernels/model/sampling.h"

#include <algorithm>

#include "kernels/ops/log_probs.h"

namespace isobit {
namespace {

void SortUnique(std::vector<int32_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

}  // namespace

SequenceSampling::SequenceSampling(const SamplingParams& params,
                                   absl::Span<const int32_t> eos_token_ids, uint64_t seed,
                                   uint32_t sample, absl::Span<const int32_t> prompt)
    : min_tokens_(params.min_tokens),
      num_prompt_(static_cast<uint32_t>(prompt.size())),
      counts_needed_(params.repetition_penalty != 1.0f || params.presence_penalty != 0.0f ||
                     params.frequency_penalty != 0.0f),
      stop_ids_(params.stop_token_ids),
      barred_ids_(params.stop_token_ids) {
  row_.temperature = params.temperature;
  row_.top_k = std::max(params.top_k, 0);
  row_.top_p = params.top_p;
  row_.min_p = params.min_p;
  row_.repetition_penalty = params.repetition_penalty;
  row_.presence_penalty = params.presence_penalty;
  row_.frequency_penalty = params.frequency_penalty;
  row_.seed = seed;
  row_.sample = sample;
  barred_ids_.insert(barred_ids_.end(), eos_token_ids.begin(), eos_token_ids.end());
  SortUnique(barred_ids_);
  if (!params.ignore_eos) stop_ids_ = barred_ids_;
  SortUnique(stop_ids_);
  for (const auto& [id, bias] : params.logit_bias) biases_.push_back({id, bias});
  for (const int32_t token : prompt) Count(token, true);
}

RowSampling SequenceSampling::NextRow(uint32_t ahead) const {
  RowSampling row = row_;
  row.position = num_prompt_ + num_completion_ + ahead;
  row.counts = counts_;
  row.biases = biases_;
  if (num_completion_ + ahead < min_tokens_) row.banned = barred_ids_;
  return row;
}

RowSampling SequenceSampling::RowBehind(absl::Span<const int32_t> guesses) {
  RowSampling row = NextRow(static_cast<uint32_t>(guesses.size()));
  if (!counts_needed_ || guesses.empty()) return row;
  std::vector<TokenCount>& counts = guessed_counts_.emplace_back(counts_);
  for (const int32_t guess : guesses) {
    const auto known = count_of_.find(guess);
    size_t index = known != count_of_.end() ? known->second : counts_.size();
    while (index < counts.size() && counts[index].id != guess) ++index;
    if (index == counts.size()) counts.push_back({.id = guess});
    ++counts[index].in_output;
  }
  row.counts = counts;
  return row;
}

void SequenceSampling::Append(int32_t token) {
  guessed_counts_.clear();
  ++num_completion_;
  Count(token, false);
}

bool SequenceSampling::IsStop(int32_t token) const {
  return std::binary_search(stop_ids_.begin(), stop_ids_.end(), token);
}

void SequenceSampling::Count(int32_t token, bool in_prompt) {
  if (!counts_needed_) return;
  const auto [it, is_new] = count_of_.try_emplace(token, counts_.size());
  if (is_new) counts_.push_back({.id = token});
  TokenCount& count = counts_[it->second];
  if (in_prompt) {
    count.in_prompt = true;
  } else {
    ++count.in_output;
  }
}

}  // namespace isobit
