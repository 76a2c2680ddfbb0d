// The order of calls to sinks and replies, with the Emitter's thread and without it.
#include "rollout/engine/emitter.h"

#include <latch>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using Log = std::vector<std::string>;

class LoggingSink final : public RequestSink {
 public:
  LoggingSink(std::string name, Log& log) : name_(std::move(name)), log_(log) {}
  void OnToken(uint32_t sample, SampledToken token) override {
    log_.push_back(absl::StrCat(name_, sample, ":", token.id));
  }
  void Flush() override { log_.push_back(name_ + " flush"); }
  void OnSampleEnd(uint32_t, SampleEnd) override {}
  void OnDone(const absl::Status&) override { log_.push_back(name_ + " done"); }

 private:
  const std::string name_;
  Log& log_;
};

std::vector<Emission> Tokens(const std::vector<std::pair<RequestSink*, int32_t>>& tokens) {
  std::vector<Emission> batch;
  for (const auto& [sink, id] : tokens) {
    batch.push_back(TokenEmission{.sink = sink, .sample = 0, .token = {.id = id}});
  }
  return batch;
}

TEST(EmitterTest, WithoutAThreadItCallsAtOnce) {
  Log log;
  LoggingSink a("a", log);
  Emitter emitter;
  std::vector<Emission> batch = Tokens({{&a, 1}});
  batch.push_back([&log] { log.push_back("reply"); });
  emitter.Emit(batch);
  EXPECT_THAT(log, ElementsAre("a0:1", "reply", "a flush"));
  EXPECT_THAT(batch, testing::IsEmpty());
}

TEST(EmitterTest, ABusyThreadFlushesSeveralStepsAtOnce) {
  Log log;
  LoggingSink a("a", log), b("b", log);
  Emitter emitter;
  emitter.Start();
  std::latch busy(1), go_on(1);
  std::vector<Emission> batch;
  batch.push_back([&] {
    busy.count_down();
    go_on.wait();
  });
  emitter.Emit(batch);
  busy.wait();
  batch = Tokens({{&a, 1}, {&b, 2}});
  emitter.Emit(batch);
  batch = Tokens({{&a, 3}});
  emitter.Emit(batch);
  go_on.count_down();
  emitter.Stop();
  EXPECT_THAT(log, ElementsAre("a0:1", "b0:2", "a0:3", "a flush", "b flush", "a flush"))
      << "and Stop has waited for all of it";
}

TEST(EmitterTest, ASinkThatIsDoneLivesUntilItsLastCall) {
  Log log;
  auto sink = std::make_shared<LoggingSink>("a", log);
  Emitter emitter;
  emitter.Start();
  std::vector<Emission> batch = Tokens({{sink.get(), 1}});
  batch.push_back([sink = std::move(sink)] { sink->OnDone(absl::OkStatus()); });
  emitter.Emit(batch);
  emitter.Stop();
  EXPECT_THAT(log, ElementsAre("a0:1", "a done", "a flush"));
}

}  // namespace
}  // namespace isobit
