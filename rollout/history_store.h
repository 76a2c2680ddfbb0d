// Texts that samples of a prompt may repeat: what other samples of it have drawn, whatever the
// weights were, and what clients send along. In bounded memory, which clients share fairly.
#ifndef ISOBIT_ROLLOUT_HISTORY_STORE_H_
#define ISOBIT_ROLLOUT_HISTORY_STORE_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "rollout/suffix_index.h"

namespace isobit {

// Of one prompt and one client. Each text begins with the prompt's end.
class PromptTexts {
 public:
  absl::Span<const int32_t> text() const { return text_; }  // kTextEnd behind each
  const SuffixIndex& index() const { return index_; }
  // Another number: positions in text() have changed.
  uint64_t generation() const { return generation_; }
  // The position of a completion's first token in text(); 0: it is not there.
  size_t Find(absl::Span<const int32_t> completion) const;
  size_t bytes() const;

 private:
  friend class HistoryStore;
  // Whether anything has changed. Drops the oldest half if the bytes exceed max_bytes.
  bool Add(absl::Span<const int32_t> prompt, absl::Span<const int32_t> completion,
           size_t max_bytes);

  std::vector<int32_t> text_;
  SuffixIndex index_;
  // By the completion's hash: where it begins. A completion is kept once.
  std::unordered_map<uint64_t, size_t> places_;
  uint64_t generation_ = 0;
};

// Not thread-safe.
class HistoryStore {
 public:
  explicit HistoryStore(size_t max_bytes) : max_bytes_(max_bytes) {}

  // INVARIANT: a client's texts are for that client's requests alone; else the time of an answer
  // would tell what others have asked (HistoryStoreTest.ClientsDoNotSeeEachOther).
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

  // Makes the entry if there is none, and the one that was used last.
  Entry& Use(Client& client, Hash hash);
  void Count(Client& client, Entry& entry);
  // Of the client with the most bytes, the prompt that was used least recently goes first.
  void Shrink();

  const size_t max_bytes_;
  std::map<std::string, Client> clients_;
  size_t bytes_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_HISTORY_STORE_H_
