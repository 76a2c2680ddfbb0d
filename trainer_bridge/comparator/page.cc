// Serves the page's files, and an event for each change.
#include "trainer_bridge/comparator/page.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "trainer_bridge/comparator/page_event.h"

namespace isobit {

// The files of page/, by cmake/embed_files.cmake.
namespace page {
extern const char kPageHtml[];
extern const char kPageCss[];
extern const char kPageJs[];
}  // namespace page

namespace {

constexpr size_t kWindow = 256;    // sequences of the rolling verdict
constexpr size_t kSequences = 48;  // shown one by one
constexpr std::chrono::milliseconds kTick(100);
constexpr int kMaxQuietTicks = 10;

// The events for one reader, one a call.
class EventSource {
 public:
  EventSource(HttpServer& server, std::shared_ptr<const History> history,
              std::shared_ptr<const SideWatch> sides, std::shared_ptr<const TokenTexts> texts)
      : server_(server),
        history_(std::move(history)),
        sides_(std::move(sides)),
        texts_(std::move(texts)) {}

  // False: the reader has gone, or the server stops.
  bool operator()(httplib::DataSink& sink) {
    for (int tick = 0; !is_first_ && tick < kMaxQuietTicks; ++tick) {
      if (!server_.Rest(kTick)) return false;
      if (history_->revision() != revision_) break;
    }
    const History::View view = history_->Look(kWindow, kSequences, is_first_ ? 0 : revision_);
    const std::string event =
        absl::StrCat("data: ", PageEvent(view, sides_->Latest(), *texts_, is_first_), "\n\n");
    is_first_ = false;
    revision_ = view.revision;
    return sink.write(event.data(), event.size());
  }

 private:
  HttpServer& server_;
  const std::shared_ptr<const History> history_;
  const std::shared_ptr<const SideWatch> sides_;
  const std::shared_ptr<const TokenTexts> texts_;
  bool is_first_ = true;
  uint64_t revision_ = 0;  // that the reader has
};

}  // namespace

void AddPage(HttpServer& server, std::shared_ptr<const History> history,
             std::shared_ptr<const SideWatch> sides, std::shared_ptr<const TokenTexts> texts) {
  const auto add = [&](const char* path, const char* text, const char* type) {
    server.GetOpen(path, [text, type](const httplib::Request&, httplib::Response& response) {
      response.set_content(text, type);
    });
  };
  add("/", page::kPageHtml, "text/html; charset=utf-8");
  add("/page.css", page::kPageCss, "text/css; charset=utf-8");
  add("/page.js", page::kPageJs, "text/javascript; charset=utf-8");
  server.Get(
      "/events",
      [&server, history = std::move(history), sides = std::move(sides), texts = std::move(texts)](
          const httplib::Request&, httplib::Response& response) {
        response.set_header("X-Accel-Buffering", "no");  // else nginx keeps events back
        response.set_chunked_content_provider(
            "text/event-stream",
            [source = std::make_shared<EventSource>(server, history, sides, texts)](
                size_t, httplib::DataSink& sink) { return (*source)(sink); });
      },
      HttpServer::Kind::kStream);
}

}  // namespace isobit
