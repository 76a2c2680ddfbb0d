// One event of the live page, as JSON: what page/page.js shows.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_EVENT_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_EVENT_H_

#include <string>

#include "trainer_bridge/comparator/history.h"
#include "trainer_bridge/comparator/token_texts.h"
#include "trainer_bridge/comparator/upstreams.h"

namespace isobit {

// The state of the comparison, in one word:
//   unequal    some token differs, or is missing on a side, whatever else is true
//   impossible some token has a logprob that no token is drawn with, in equal bits on both sides
//   waiting    a side does not answer, or has no weights yet
//   refused    both answer and cannot be compared
//   comparing  nothing is compared yet, and a comparison is under way
//   ready      nothing is compared yet
//   equal      all tokens compared have equal bits
const char* StateOf(const History::View& view, const UpstreamInfos& sides);

// `is_first`: the reader has nothing yet; else view.seconds are those that have changed since its
// last event. Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity".
std::string PageEvent(const History::View& view, const UpstreamInfos& sides,
                      const TokenTexts& texts, bool is_first);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_PAGE_EVENT_H_
