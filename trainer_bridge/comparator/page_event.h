// One event of the live page as JSON: what page/page.js displays.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_EVENT_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_EVENT_H_

#include <string>

#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/token_texts.h"
#include "trainer_bridge/comparator/upstreams.h"

namespace isobit {

// The state of the comparison, in one word; the first that applies:
//   unequal    a token differs, or is missing on a side
//   impossible a token has, with equal bits on both sides, a logprob that no drawn token can have
//   waiting    a side does not answer, or has no weights yet
//   refused    both sides answer but cannot be compared
//   comparing  nothing has been compared yet, and a comparison is running
//   ready      nothing has been compared yet
//   equal      all compared tokens have equal bits
const char* StateOf(const History::View& view, const UpstreamInfos& sides);

// `is_first`: the reader has got nothing yet; otherwise view.seconds are those that have changed
// since its last event. Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".
std::string PageEvent(const History::View& view, const UpstreamInfos& sides,
                      const TokenTexts& texts, bool is_first);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_EVENT_H_
