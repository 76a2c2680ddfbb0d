// Writes the JSON.
#include "trainer_bridge/comparator/page_event.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "trainer_bridge/comparator/side_watch.h"

namespace isobit {
namespace {

using Json = nlohmann::json;

Json Number(double value) {
  if (std::isfinite(value)) return value;
  if (std::isnan(value)) return "NaN";
  return value > 0 ? "Infinity" : "-Infinity";
}

int64_t Milliseconds(History::Time time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
}

std::string Hex(uint32_t bits) { return absl::StrFormat("0x%08x", bits); }

Json SummaryJson(const v1::CompareSummary& summary) {
  const v1::GapStatistics& statistics = summary.statistics();
  return {{"sequences", summary.num_sequences()},
          {"unequal_sequences", summary.num_unequal_sequences()},
          {"tokens", statistics.num_tokens()},
          {"unequal", statistics.num_unequal()},
          {"nan", statistics.num_nan()},
          {"impossible", statistics.num_impossible()},
          {"kl_k1", Number(statistics.kl_k1())},
          {"kl_k2", Number(statistics.kl_k2())},
          {"kl_k3", Number(statistics.kl_k3())},
          {"max_abs_dlogp", Number(statistics.max_abs_dlogp())},
          {"max_ulp", statistics.max_ulp_distance()}};
}

Json VersionJson(const v1::WeightVersion& version) {
  return {{"id", version.id()}, {"digest", version.digest()}};
}

template <typename Info>
Json SideJson(const absl::StatusOr<Info>& info) {
  if (!info.ok()) return {{"error", absl::StrCat(info.status().message())}};
  const v1::ServerInfo& server = info->server();
  return {{"weights", VersionJson(server.weight_version())},
          {"fingerprint", server.fingerprint().hex()},
          {"contract", server.fingerprint().contract_version()},
          {"model", server.model().architecture()},
          {"numerics", v1::NumericsMode_Name(server.numerics_mode())},
          {"version", server.version()}};
}

Json SidesJson(const UpstreamInfos& sides) {
  Json rollout = SideJson(sides.rollout), scorer = SideJson(sides.scorer);
  if (sides.rollout.ok()) rollout["tp_size"] = sides.rollout->tensor_parallel_size();
  if (sides.scorer.ok()) scorer["shards"] = sides.scorer->num_shards();
  return {{"rollout", std::move(rollout)}, {"scorer", std::move(scorer)}};
}

Json WorstJson(const History::WorstToken& worst, const TokenTexts& texts) {
  const v1::TokenGap& gap = worst.gap;
  return {{"sequence", worst.sequence_id},
          {"time", Milliseconds(worst.time)},
          {"position", gap.position()},
          {"token", gap.token_id()},
          {"text", texts.Of(gap.token_id())},
          {"rollout", Number(gap.rollout_logprob())},
          {"scorer", Number(gap.scorer_logprob())},
          {"rollout_bits", Hex(gap.rollout_bits())},
          {"scorer_bits", Hex(gap.scorer_bits())},
          {"dlogp", Number(gap.dlogp())},
          {"ulp", gap.ulp_distance()},
          {"version", gap.rollout_weight_version()}};
}

Json SequenceJson(const SequenceOutcome& outcome) {
  Json sequence = {{"id", outcome.sequence_id},
                   {"tokens", outcome.statistics.num_tokens()},
                   {"unequal", outcome.statistics.num_unequal()},
                   {"impossible", outcome.statistics.num_impossible()},
                   {"max_ulp", outcome.statistics.max_ulp_distance()},
                   {"strip", outcome.strip}};
  if (outcome.first_divergence) sequence["first"] = *outcome.first_divergence;
  return sequence;
}

// [time, tokens, unequal, k1, k2, k3, largest |dlogp|]
Json SecondJson(const History::Second& second) {
  const GapStatistics& statistics = second.statistics;
  return {second.unix_time,
          statistics.num_tokens(),
          statistics.num_unequal(),
          Number(statistics.kl_k1()),
          Number(statistics.kl_k2()),
          Number(statistics.kl_k3()),
          Number(statistics.max_abs_dlogp())};
}

template <typename Items, typename ToJson>
Json ListJson(const Items& items, const ToJson& to_json) {
  Json list = Json::array();
  for (const auto& item : items) list.push_back(to_json(item));
  return list;
}

bool HasWeights(const auto& info) { return info.ok() && info->server().weight_version().id() > 0; }

}  // namespace

const char* StateOf(const History::View& view, const UpstreamInfos& sides) {
  const v1::GapStatistics& total = view.total.statistics();
  if (total.num_unequal() > 0 || view.num_missing > 0) return "unequal";
  if (total.num_impossible() > 0) return "impossible";
  if (!HasWeights(sides.rollout) || !HasWeights(sides.scorer)) return "waiting";
  if (!Obstacle(sides).empty()) return "refused";
  if (total.num_tokens() > 0) return "equal";
  return view.num_open > 0 ? "comparing" : "ready";
}

std::string PageEvent(const History::View& view, const UpstreamInfos& sides,
                      const TokenTexts& texts, bool is_first) {
  Json total = SummaryJson(view.total);
  total["missing"] = view.num_missing;
  const Json event = {
      {"first", is_first},
      {"version", ISOBIT_VERSION},
      {"uptime", view.uptime_seconds},
      {"time", Milliseconds(std::chrono::system_clock::now())},
      {"state", StateOf(view, sides)},
      {"obstacle", Obstacle(sides)},
      {"open", view.num_open},
      {"refused", view.num_refused},
      {"total", std::move(total)},
      {"window", SummaryJson(view.window)},
      {"sides", SidesJson(sides)},
      {"has_texts", !texts.empty()},
      {"worst", ListJson(view.worst, [&](const auto& worst) { return WorstJson(worst, texts); })},
      {"sequences", ListJson(view.sequences, &SequenceJson)},
      {"seconds", ListJson(view.seconds, &SecondJson)},
      {"refusals",
       ListJson(view.refusals,
                [](const History::Refusal& refusal) {
                  return Json{{"time", Milliseconds(refusal.time)}, {"why", refusal.why}};
                })},
      {"marks", ListJson(view.marks, [](const History::Mark& mark) {
         Json json = VersionJson(mark.version);
         json["time"] = Milliseconds(mark.time);
         json["side"] = mark.side;
         return json;
       })}};
  // A token's text, and the end of a text that was cut, may be half a character.
  return event.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace isobit
