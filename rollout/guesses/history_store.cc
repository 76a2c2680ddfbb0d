// Texts by client and prompt, and what goes when memory is short.
#include "rollout/guesses/history_store.h"

#include <algorithm>

namespace isobit {
namespace {

constexpr size_t kEntryBytes = 512;  // of an entry without texts, its places in maps included
constexpr size_t kTextBytes = 64;    // of a text's place
// One prompt may take this part of the store.
constexpr size_t kShareOfPrompt = 8;

uint64_t HashOf(absl::Span<const int32_t> tokens) {
  uint64_t hash = tokens.size();
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 29;
  }
  return hash;
}

}  // namespace

size_t PromptTexts::bytes() const {
  return kEntryBytes + text_.capacity() * sizeof(int32_t) + index_.bytes() +
         places_.size() * kTextBytes;
}

size_t PromptTexts::Find(absl::Span<const int32_t> completion) const {
  const auto place = places_.find(HashOf(completion));
  return place == places_.end() ? 0 : place->second;
}

bool PromptTexts::Add(absl::Span<const int32_t> prompt, absl::Span<const int32_t> completion,
                      size_t max_bytes) {
  if (completion.size() <= SuffixIndex::kLeast) return false;
  const auto end = prompt.last(std::min(prompt.size(), SuffixIndex::kMost));
  if (!places_.emplace(HashOf(completion), text_.size() + end.size()).second) return false;
  text_.insert(text_.end(), end.begin(), end.end());
  text_.insert(text_.end(), completion.begin(), completion.end());
  text_.push_back(kTextEnd);
  index_.Extend(text_);
  if (bytes() <= max_bytes) return true;
  // The latest texts, in at most half of the memory. Texts that were dropped may come again.
  size_t kept = text_.size() / 2;
  while (text_[kept - 1] != kTextEnd) ++kept;
  text_ = std::vector<int32_t>(text_.begin() + static_cast<std::ptrdiff_t>(kept), text_.end());
  index_ = SuffixIndex();
  index_.Extend(text_);
  places_.clear();
  ++generation_;
  return true;
}

HistoryStore::Entry& HistoryStore::Use(Client& client, Hash hash) {
  const auto [it, is_new] = client.entries.try_emplace(hash);
  Entry& entry = it->second;
  if (is_new) {
    entry.texts = std::make_shared<PromptTexts>();
    entry.place = client.order.insert(client.order.end(), hash);
    Count(client, entry);
  } else {
    client.order.splice(client.order.end(), client.order, entry.place);
  }
  return entry;
}

void HistoryStore::Count(Client& client, Entry& entry) {
  const size_t bytes = entry.texts->bytes();
  client.bytes += bytes - entry.bytes;
  bytes_ += bytes - entry.bytes;
  entry.bytes = bytes;
}

std::shared_ptr<const PromptTexts> HistoryStore::Open(const std::string& client,
                                                      absl::Span<const int32_t> prompt) {
  std::shared_ptr<const PromptTexts> texts = Use(clients_[client], HashOf(prompt)).texts;
  Shrink();
  return texts;
}

void HistoryStore::Add(const std::string& client, absl::Span<const int32_t> prompt,
                       absl::Span<const int32_t> completion) {
  Client& of_client = clients_[client];
  Entry& entry = Use(of_client, HashOf(prompt));
  if (entry.texts->Add(prompt, completion, max_bytes_ / kShareOfPrompt)) Count(of_client, entry);
  Shrink();
}

void HistoryStore::Shrink() {
  while (bytes_ > max_bytes_) {
    const auto largest = std::ranges::max_element(
        clients_, {}, [](const auto& entry) { return entry.second.bytes; });
    Client& client = largest->second;
    const auto oldest = client.entries.find(client.order.front());
    client.bytes -= oldest->second.bytes;
    bytes_ -= oldest->second.bytes;
    client.entries.erase(oldest);
    client.order.pop_front();
    if (client.entries.empty()) clients_.erase(largest);
  }
}

}  // namespace isobit
