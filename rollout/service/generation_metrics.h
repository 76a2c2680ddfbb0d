// Counters and times of requests: tokens, and how long each sample takes.
#ifndef ISOBIT_ROLLOUT_SERVICE_GENERATION_METRICS_H_
#define ISOBIT_ROLLOUT_SERVICE_GENERATION_METRICS_H_

#include <chrono>
#include <cstdint>
#include <map>

#include "common/metrics/metrics.h"

namespace isobit {

struct GenerationMetrics {
  prometheus::Counter& tokens;
  prometheus::Histogram& first_token_seconds;   // of each sample, since the request's arrival
  prometheus::Histogram& output_token_seconds;  // of each sample, the mean between two tokens
};

// Measures one request. After Arrive, it is used only on the thread that calls sinks.
class RequestMeasurement {
 public:
  // `metrics` outlive it.
  explicit RequestMeasurement(const GenerationMetrics& metrics) : metrics_(metrics) {}

  void Arrive() { arrival_ = Clock::now(); }

  void OnToken(uint32_t sample) {
    metrics_.tokens.Increment();
    if (first_tokens_.contains(sample)) return;
    const Clock::time_point now = Clock::now();
    first_tokens_[sample] = now;
    metrics_.first_token_seconds.Observe(Seconds(now - arrival_));
  }

  void OnSampleEnd(uint32_t sample, uint32_t num_tokens) {
    const auto first = first_tokens_.find(sample);
    if (first == first_tokens_.end() || num_tokens < 2) return;
    metrics_.output_token_seconds.Observe(Seconds(Clock::now() - first->second) / (num_tokens - 1));
  }

 private:
  using Clock = std::chrono::steady_clock;
  static double Seconds(Clock::duration duration) {
    return std::chrono::duration<double>(duration).count();
  }

  const GenerationMetrics& metrics_;
  Clock::time_point arrival_;
  std::map<uint32_t, Clock::time_point> first_tokens_;  // their arrival times, by sample
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_GENERATION_METRICS_H_
