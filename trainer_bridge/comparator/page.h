// The live page: its files, which are built into the binary, and its stream of events.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_H_

#include <memory>

#include "common/http/http_server.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/side_watch.h"
#include "trainer_bridge/comparator/token_texts.h"

namespace isobit {

// Adds to `server` the files /, /page.js and /page.css, which contain no data and are open to every
// caller, and the server-sent events /events, for callers with a role for them. A change is sent
// within a fifth of a second; without one, an event per second. `server` outlives its requests.
void AddPage(HttpServer& server, std::shared_ptr<const History> history,
             std::shared_ptr<const SideWatch> sides, std::shared_ptr<const TokenTexts> texts);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_H_
