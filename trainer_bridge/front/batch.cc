#include "trainer_bridge/front/batch.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"

namespace isobit::front {
namespace {

template <typename T>
torch::Tensor Int32(const std::vector<T>& values, torch::Device device) {
  const std::vector<int32_t> narrow(values.begin(), values.end());
  return torch::tensor(narrow, torch::TensorOptions(device).dtype(torch::kInt32));
}

absl::Status CheckSequence(const TrainingSequence& s, size_t index) {
  const auto length = static_cast<int64_t>(s.ids.size());
  if (s.prompt_length < 1 || s.prompt_length > length) {
    return absl::InvalidArgumentError(absl::StrCat("sequence ", index,
                                                   ": expected a prompt of 1 to ", length,
                                                   " tokens (all it has), got ", s.prompt_length));
  }
  if (*std::min_element(s.ids.begin(), s.ids.end()) < 0) {
    return absl::InvalidArgumentError(absl::StrCat("sequence ", index, ": a token is negative"));
  }
  return absl::OkStatus();
}

// The ranges are those of the services.
absl::Status CheckSampling(const TrainingSequence& s, size_t index) {
  const auto check = [index](bool holds, absl::string_view name, absl::string_view range,
                             auto value) {
    if (holds) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", index, ": ", name, ": expected ", range, ", got ", value));
  };
  const float t = s.temperature;
  absl::Status status =
      check(t == 0 || (t >= 0.001f && t <= 1000), "temperature", "0, or 0.001 to 1000", t);
  status.Update(check(s.top_k >= -1, "top_k", "an integer from -1 on", s.top_k));
  status.Update(check(s.top_p > 0 && s.top_p <= 1, "top_p", "above 0, up to 1", s.top_p));
  status.Update(check(s.min_p >= 0 && s.min_p <= 1, "min_p", "0 to 1", s.min_p));
  return status;
}

bool IsCountOfLanes(int64_t n) { return n >= 1 && n <= 64 && (n & (n - 1)) == 0; }

absl::Status CheckPacks(absl::Span<const int64_t> packs, size_t sequences) {
  if (!IsCountOfLanes(static_cast<int64_t>(packs.size()))) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a power of two up to 64 of packs, got ", packs.size()));
  }
  int64_t sum = 0;
  for (const int64_t count : packs) {
    if (count < 0) return absl::InvalidArgumentError("a pack has a negative number of sequences");
    sum += count;
  }
  if (sum != static_cast<int64_t>(sequences)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected packs of ", sequences, " sequences in all, got ", sum));
  }
  return absl::OkStatus();
}

// The tensor of one sampling parameter; undefined if all rows have the default.
template <typename T>
torch::Tensor RowsOf(const std::vector<T>& values, T neutral, const torch::TensorOptions& options) {
  const bool all = std::all_of(values.begin(), values.end(), [&](T v) { return v == neutral; });
  return all ? torch::Tensor() : torch::tensor(values, options);
}

// Ids, positions and sequence bounds.
void AddTokens(absl::Span<const TrainingSequence> sequences, torch::Device device,
               TrainingBatch* batch) {
  std::vector<int32_t> ids, positions;
  batch->sequences = {0};
  for (const TrainingSequence& s : sequences) {
    for (size_t p = 0; p < s.ids.size(); ++p) positions.push_back(static_cast<int32_t>(p));
    ids.insert(ids.end(), s.ids.begin(), s.ids.end());
    batch->sequences.push_back(static_cast<int64_t>(ids.size()));
    batch->max_length = std::max(batch->max_length, static_cast<int64_t>(s.ids.size()));
  }
  batch->ids = Int32(ids, device);
  batch->positions = Int32(positions, device);
  batch->cu_seqlens = Int32(batch->sequences, device);

  std::map<int32_t, std::vector<int32_t>> rows_of;
  for (size_t r = 0; r < ids.size(); ++r) rows_of[ids[r]].push_back(static_cast<int32_t>(r));
  std::vector<int32_t> unique_ids, starts = {0}, rows_by_id;
  for (const auto& [id, rows] : rows_of) {
    unique_ids.push_back(id);
    rows_by_id.insert(rows_by_id.end(), rows.begin(), rows.end());
    starts.push_back(static_cast<int32_t>(rows_by_id.size()));
  }
  batch->max_id = unique_ids.back();
  batch->unique_ids = Int32(unique_ids, device);
  batch->starts = Int32(starts, device);
  batch->rows_by_id = Int32(rows_by_id, device);
}

// The scored rows, their targets and how these were drawn. Returns the rows.
std::vector<int64_t> AddTargets(absl::Span<const TrainingSequence> sequences, torch::Device device,
                                TrainingBatch* batch) {
  std::vector<int64_t> scored;
  std::vector<int32_t> targets, top_k;
  std::vector<float> temperature, top_p, min_p;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const TrainingSequence& s = sequences[i];
    for (auto p = static_cast<size_t>(s.prompt_length); p < s.ids.size(); ++p) {
      scored.push_back(batch->sequences[i] + static_cast<int64_t>(p) - 1);
      targets.push_back(s.ids[p]);
      temperature.push_back(s.temperature);
      top_k.push_back(s.top_k);
      top_p.push_back(s.top_p);
      min_p.push_back(s.min_p);
    }
  }
  const auto fp32 = torch::TensorOptions(device).dtype(torch::kFloat32);
  batch->scored = torch::tensor(scored, torch::TensorOptions(device).dtype(torch::kInt64));
  batch->targets = Int32(targets, device);
  batch->sampling = {RowsOf(temperature, 1.0f, fp32), RowsOf(top_k, 0, fp32.dtype(torch::kInt32)),
                     RowsOf(top_p, 1.0f, fp32), RowsOf(min_p, 0.0f, fp32)};
  return scored;
}

}  // namespace

absl::StatusOr<TrainingBatch> MakeBatch(absl::Span<const TrainingSequence> sequences,
                                        absl::Span<const int64_t> packs, torch::Device device) {
  if (sequences.empty()) return absl::InvalidArgumentError("expected at least one sequence");
  if (auto status = CheckPacks(packs, sequences.size()); !status.ok()) return status;
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (auto status = CheckSequence(sequences[i], i); !status.ok()) return status;
    if (auto status = CheckSampling(sequences[i], i); !status.ok()) return status;
  }
  TrainingBatch batch;
  AddTokens(sequences, device, &batch);
  const std::vector<int64_t> scored = AddTargets(sequences, device, &batch);
  batch.packs = {0};
  batch.scored_packs = {0};
  size_t sequence = 0;
  for (const int64_t count : packs) {
    sequence += static_cast<size_t>(count);
    const int64_t end = batch.sequences[sequence];
    batch.packs.push_back(end);
    batch.scored_packs.push_back(std::lower_bound(scored.begin(), scored.end(), end) -
                                 scored.begin());
  }
  return batch;
}

absl::StatusOr<std::vector<std::vector<int64_t>>> CutIntoSlots(absl::Span<const int64_t> lengths,
                                                               int64_t pack_tokens, int64_t lanes) {
  if (pack_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("pack_tokens: expected at least 1, got ", pack_tokens));
  }
  if (!IsCountOfLanes(lanes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("lanes: expected a power of two from 1 to 64, got ", lanes));
  }
  std::vector<std::vector<int64_t>> slots;
  size_t pack = 0;  // how many there are
  int64_t tokens = pack_tokens;
  for (const int64_t length : lengths) {
    if (length < 1) {
      return absl::InvalidArgumentError(absl::StrCat("lengths: expected at least 1, got ", length));
    }
    tokens += length;
    if (tokens > pack_tokens) {
      if (pack % static_cast<size_t>(lanes) == 0) slots.emplace_back(lanes);
      ++pack;
      tokens = length;
    }
    ++slots.back()[(pack - 1) % static_cast<size_t>(lanes)];
  }
  return slots;
}

}  // namespace isobit::front
