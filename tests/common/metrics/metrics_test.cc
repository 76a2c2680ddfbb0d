// Metrics: what Collect says, names, and updates from many threads.
#include "common/metrics/metrics.h"

#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace isobit {
namespace {

using prometheus::MetricType;

const prometheus::MetricFamily* Find(const std::vector<prometheus::MetricFamily>& families,
                                     const std::string& name) {
  for (const prometheus::MetricFamily& family : families) {
    if (family.name == name) return &family;
  }
  return nullptr;
}

TEST(MetricsTest, CollectsWhatWasCounted) {
  Metrics metrics;
  prometheus::Counter& tokens = metrics.AddCounter("isobit_tokens_total", "Tokens.");
  EXPECT_EQ(&metrics.AddCounter("isobit_tokens_total", "Tokens."), &tokens);
  prometheus::Counter& other =
      metrics.AddCounter("isobit_tokens_total", "Tokens.", {{"kind", "other"}});
  tokens.Increment();
  tokens.Increment(41);
  other.Increment(7);
  const auto families = metrics.Collect();
  ASSERT_EQ(families.size(), 1u);
  EXPECT_EQ(families[0].type, MetricType::Counter);
  EXPECT_EQ(families[0].help, "Tokens.");
  ASSERT_EQ(families[0].metric.size(), 2u);
  for (const prometheus::ClientMetric& metric : families[0].metric) {
    EXPECT_EQ(metric.counter.value, metric.label.empty() ? 42 : 7);
  }
}

TEST(MetricsTest, ABoundBelongsToItsBucket) {
  Metrics metrics;
  prometheus::Histogram& time = metrics.AddHistogram("isobit_time_seconds", "Time.", {1, 2});
  for (const double seconds : {0.5, 1.0, 1.5, 2.5}) time.Observe(seconds);
  const auto families = metrics.Collect();
  ASSERT_EQ(families.size(), 1u);
  const prometheus::ClientMetric::Histogram& histogram = families[0].metric.at(0).histogram;
  EXPECT_EQ(histogram.sample_count, 4u);
  EXPECT_EQ(histogram.sample_sum, 5.5);
  ASSERT_EQ(histogram.bucket.size(), 3u);
  EXPECT_EQ(histogram.bucket[0].cumulative_count, 2u);
  EXPECT_EQ(histogram.bucket[1].cumulative_count, 3u);
  EXPECT_EQ(histogram.bucket[2].cumulative_count, 4u);
  EXPECT_TRUE(std::isinf(histogram.bucket[2].upper_bound));
}

TEST(MetricsTest, AnObservationIsReadUntilItEnds) {
  Metrics metrics;
  double pages = 3;
  int reads = 0;
  auto used = metrics.Observe(MetricType::Gauge, "isobit_pages", "Pages.",
                              [&] {
                                ++reads;
                                return pages;
                              },
                              {{"state", "used"}});
  const auto free = metrics.Observe(MetricType::Gauge, "isobit_pages", "Pages.", [] { return 9; },
                                    {{"state", "free"}});
  EXPECT_EQ(reads, 0);
  pages = 4;
  auto families = metrics.Collect();
  ASSERT_EQ(families.size(), 1u) << "one family of two series";
  ASSERT_EQ(families[0].metric.size(), 2u);
  EXPECT_EQ(families[0].metric[0].gauge.value, 4);
  EXPECT_EQ(families[0].metric[0].label.at(0).value, "used");
  EXPECT_EQ(families[0].metric[1].gauge.value, 9);
  used.reset();
  families = metrics.Collect();
  EXPECT_EQ(reads, 1);
  ASSERT_EQ(families[0].metric.size(), 1u);
  EXPECT_EQ(families[0].metric[0].label.at(0).value, "free");
}

TEST(MetricsDeathTest, NamesKeepTheRules) {
  Metrics metrics;
  const auto zero = [] { return 0.0; };
  EXPECT_DEATH(metrics.AddCounter("tokens_total", ""), "prefix isobit_");
  EXPECT_DEATH(metrics.AddCounter("isobit_tokens", ""), "_total");
  EXPECT_DEATH(metrics.AddCounter("isobit:tokens_total", ""), "isobit");
  EXPECT_DEATH(metrics.AddCounter("isobit_Tokens_total", ""), "lower-case");
  EXPECT_DEATH(metrics.AddHistogram("isobit_time_total", "", {1}), "_total");
  EXPECT_DEATH((void)metrics.Observe(MetricType::Gauge, "isobit_pages_total", "", zero), "_total");
}

// Counters lose nothing, and a figure is not read after its observation has ended, whoever collects
// meanwhile. The second is for the sanitizers, too: `alive` is on the stack.
TEST(MetricsTest, ManyThreadsUpdateWhileOthersCollect) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 2000;
  Metrics metrics;
  prometheus::Counter& counter = metrics.AddCounter("isobit_steps_total", "Steps.");
  prometheus::Histogram& time = metrics.AddHistogram("isobit_time_seconds", "Time.", {0.5});
  std::atomic<int> late_reads = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kRounds; ++i) {
        counter.Increment();
        time.Observe(i % 2);
        std::atomic<bool> alive = true;
        auto observation = metrics.Observe(MetricType::Gauge, "isobit_alive", "Alive.", [&] {
          late_reads += alive ? 0 : 1;
          return 1;
        });
        observation.reset();
        alive = false;
      }
    });
  }
  std::atomic<bool> done = false;
  double last = 0;
  std::thread collector([&] {
    while (!done) {
      const auto families = metrics.Collect();
      const double now = Find(families, "isobit_steps_total")->metric.at(0).counter.value;
      EXPECT_GE(now, last);
      last = now;
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  collector.join();
  EXPECT_EQ(late_reads, 0);
  const auto families = metrics.Collect();
  EXPECT_EQ(counter.Value(), kThreads * kRounds);
  const auto& histogram = Find(families, "isobit_time_seconds")->metric.at(0).histogram;
  EXPECT_EQ(histogram.sample_count, static_cast<uint64_t>(kThreads * kRounds));
  EXPECT_EQ(histogram.bucket.at(0).cumulative_count, static_cast<uint64_t>(kThreads * kRounds / 2));
  EXPECT_EQ(Find(families, "isobit_alive"), nullptr);
}

}  // namespace
}  // namespace isobit
