// The live page: its files, which are part of the binary, and the stream of events that it shows.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_H_

#include <memory>

#include "common/http/http_server.h"
#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/side_watch.h"
#include "trainer_bridge/comparator/token_texts.h"

namespace isobit {

// Adds to `server`: /, /page.js and /page.css, which tell nothing and are for all; and /events, the
// server-sent events, for those with a role for it. A change shows within a fifth of a second;
// without one there is an event a second. `server` outlives its requests.
void AddPage(HttpServer& server, std::shared_ptr<const History> history,
             std::shared_ptr<const SideWatch> sides, std::shared_ptr<const TokenTexts> texts);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_H_
