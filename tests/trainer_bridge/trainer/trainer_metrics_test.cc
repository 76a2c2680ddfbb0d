// isobit-trainer's metrics: what was added is what is collected.
#include "trainer_bridge/trainer/trainer_metrics.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace isobit::trainer {
namespace {

// By name, with the part behind it if there is one.
std::map<std::string, double> Collect(const TrainerMetrics& metrics) {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : metrics.metrics()->Collect()) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      const std::string part = metric.label.empty() ? "" : absl::StrCat(" ", metric.label[0].value);
      const bool is_counter = family.type == prometheus::MetricType::Counter;
      values[absl::StrCat(family.name, part)] = family.type == prometheus::MetricType::Histogram
                                                    ? metric.histogram.sample_sum
                                                : is_counter ? metric.counter.value
                                                             : metric.gauge.value;
    }
  }
  return values;
}

TEST(TrainerMetricsTest, CollectsWhatWasAdded) {
  TrainerMetrics metrics;
  for (const auto& [name, value] : Collect(metrics)) EXPECT_EQ(value, 0.0) << name;
  metrics.AddComparison({.tokens = 40});
  metrics.AddStep(7, 0.25, {{"train", 2.0}, {"sync", 0.5}});
  metrics.AddComparison({.tokens = 2,
                         .unequal = 1,
                         .impossible = 1,
                         .max_abs_dlogp = 0.5,
                         .kl = 0.05,
                         .kl_k1 = 0.25,
                         .kl_k2 = 0.125});
  metrics.AddStep(8, 0.75, {{"train", 1.0}, {"sync", 4.0}});
  const std::map<std::string, double> expected = {{"step", 8},
                                                  {"reward_mean", 0.75},
                                                  {"staleness_mean", 0},
                                                  {"step_seconds_total sample", 0},
                                                  {"step_seconds_total train", 3},
                                                  {"step_seconds_total compare", 0},
                                                  {"step_seconds_total sync", 4.5},
                                                  {"weight_sync_seconds", 4.5},
                                                  {"tokens_compared_total", 42},
                                                  {"tokens_unequal_total", 1},
                                                  {"tokens_impossible_total", 1},
                                                  {"logprob_abs_diff_max", 0.5},
                                                  {"kl_k1", 0.25},
                                                  {"kl_k2", 0.125},
                                                  {"kl_k3", 0.05}};
  const std::map<std::string, double> actual = Collect(metrics);
  EXPECT_EQ(actual.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(absl::StrCat("isobit_trainer_", name));
    ASSERT_NE(found, actual.end()) << name;
    EXPECT_EQ(found->second, value) << name;
  }
}

}  // namespace
}  // namespace isobit::trainer
