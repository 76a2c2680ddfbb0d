// Texts that samples of a prompt may repeat: what its other samples have drawn, under any weights,
// and what clients send along. Memory is bounded, and clients share it fairly.
#ifndef ISOBIT_ROLLOUT_GUESSES_HISTORY_STORE_H_
#define ISOBIT_ROLLOUT_GUESSES_HISTORY_STORE_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "rollout/guesses/suffix_index.h"

namespace isobit {

// The texts of one prompt of one client. Each begins with the end of the prompt.
class PromptTexts {
 public:
  absl::Span<const int32_t> text() const { return text_; }  // kTextEnd behind each
  const SuffixIndex& index() const { return index_; }
  // If it changes, positions in text() have changed.
  uint64_t generation() const { return generation_; }
  // The position in text() of a completion's first token; 0 if the completion is not there.
  size_t Find(absl::Span<const int32_t> completion) const;
  size_t bytes() const;

 private:
  friend class HistoryStore;
  // Returns whether anything has changed. Drops the oldest half if the bytes exceed max_bytes.
  bool Add(absl::Span<const int32_t> prompt, absl::Span<const int32_t> completion,
           size_t max_bytes);

  std::vector<int32_t> text_;
  SuffixIndex index_;
  // Where each completion begins, by its hash. A completion is kept once.
  std::unordered_map<uint64_t, size_t> places_;
  uint64_t generation_ = 0;
};

// Not thread-safe.
class HistoryStore {
 public:
  explicit HistoryStore(size_t max_bytes) : max_bytes_(max_bytes) {}

  // INVARIANT: a client's texts serve only that client's requests; otherwise response times would
  // reveal what others have asked (DraftersTest.ClientsDoNotSeeEachOther).
  std::shared_ptr<const PromptTexts> Open(const std::string& client,
                                          absl::Span<const int32_t> prompt);
  void Add(const std::string& client, absl::Span<const int32_t> prompt,
           absl::Span<const int32_t> completion);

  size_t bytes() const { return bytes_; }  // at most max_bytes after each call

 private:
  using Hash = uint64_t;  // of a prompt; two prompts with one hash would share their texts
  struct Entry {
    std::shared_ptr<PromptTexts> texts;
    std::list<Hash>::iterator place;  // in `order`
    size_t bytes = 0;
  };
  struct Client {
    std::unordered_map<Hash, Entry> entries;
    std::list<Hash> order;  // the least recently used first
    size_t bytes = 0;
  };

  // Finds or makes the entry, and marks it as the one used last.
  Entry& Use(Client& client, Hash hash);
  void Count(Client& client, Entry& entry);
  // Drops, from the client with the most bytes, the least recently used prompts first.
  void Shrink();

  const size_t max_bytes_;
  std::map<std::string, Client> clients_;
  size_t bytes_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_HISTORY_STORE_H_
