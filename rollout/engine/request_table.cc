// The life of a request, from its ticket to its end.
#include "rollout/engine/request_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

namespace isobit {
namespace {

// The filters may have left fewer candidates than were asked for.
std::vector<TokenLogProb> WithoutUnused(std::vector<TokenLogProb> top) {
  top.erase(std::find_if(top.begin(), top.end(), [](const auto& t) { return t.id < 0; }),
            top.end());
  return top;
}

}  // namespace

void EndedRequests::clear() {
  requests.clear();
  samplings.clear();
}

RequestTable::RequestTable(const SchedulerLimits& scheduler, const QueueLimits& queue,
                           const PoolSize& pages,
                           const std::shared_ptr<const WeightVersion>& version,
                           std::vector<Emission>& outbox, Guesser* guesser)
    : limits_(queue),
      version_(version),
      outbox_(outbox),
      guesser_(guesser),
      pages_(pages),
      scheduler_(scheduler, pages_, guesser) {}

absl::Status RequestTable::CheckQueue(const std::string& id, int64_t tokens) const {
  if (version_ == nullptr) return absl::UnavailableError("the weights are not loaded yet");
  if (tickets_.count(id) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("request_id: \"", id, "\" is already in flight"));
  }
  const size_t requests = scheduler_.num_waiting_requests();
  if (requests == 0) return absl::OkStatus();
  if (requests >= limits_.max_waiting_requests) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", requests,
                                                     " requests wait, at most ",
                                                     limits_.max_waiting_requests, " may"));
  }
  if (scheduler_.num_waiting_tokens() + tokens > limits_.max_waiting_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", scheduler_.num_waiting_tokens(), " tokens wait, ",
                     tokens, " more would exceed ", limits_.max_waiting_tokens));
  }
  return absl::OkStatus();
}

uint64_t RequestTable::Add(std::unique_ptr<Request> request) {
  const uint64_t ticket = next_ticket_++;
  request->ticket = ticket;
  tickets_.emplace(request->id, ticket);
  for (const auto& sequence : request->samples) scheduler_.Add(*sequence);
  next_expiry_ = std::min(next_expiry_, request->expiry);
  requests_.emplace(ticket, std::move(request));
  return ticket;
}

bool RequestTable::Cancel(uint64_t ticket, const std::string& reason) {
  const auto it = requests_.find(ticket);
  if (it == requests_.end()) return false;
  it->second->abort_reason = reason;
  return true;
}

std::vector<std::string> RequestTable::Abort(absl::Span<const std::string> ids,
                                             const std::optional<std::string>& client) {
  std::vector<std::string> aborted;
  for (const std::string& id : ids) {
    const auto ticket = tickets_.find(id);
    if (ticket == tickets_.end()) continue;
    Request& request = *requests_.at(ticket->second);
    if (client && request.client != *client) continue;
    if (request.abort_reason.empty()) aborted.push_back(id);
    request.abort_reason = "aborted by a client";
  }
  return aborted;
}

void RequestTable::EndDue(Clock::time_point now) {
  next_expiry_ = Clock::time_point::max();
  for (auto it = requests_.begin(); it != requests_.end();) {
    Request& request = *it->second;
    if (now >= request.expiry) request.abort_reason = "timeout_ms has passed";
    if (request.abort_reason.empty()) {
      next_expiry_ = std::min(next_expiry_, request.expiry);
      ++it;
    } else {
      it = Abort(it, request.abort_reason);
    }
  }
}

size_t RequestTable::AbortAll(const std::string& reason) {
  const size_t num_aborted = requests_.size();
  for (auto it = requests_.begin(); it != requests_.end();) it = Abort(it, reason);
  return num_aborted;
}

void RequestTable::FailAll(const absl::Status& status) {
  for (auto it = requests_.begin(); it != requests_.end();) it = Close(it, status);
}

// INVARIANT: a sequence's tokens and their bits are those that it has without guesses
// (SpeculationTest.*).
void RequestTable::CommitDraws(Sequence& sequence, absl::Span<LogProbResult> draws) {
  const std::vector<int32_t> guesses = std::exchange(sequence.guesses, {});
  const bool were_candidates = std::exchange(sequence.guesses_were_candidates, false);
  sequence.num_draft_tokens += static_cast<uint32_t>(guesses.size());
  // One that was preempted meanwhile has lost its pages, and the queue counts one pending token.
  const auto goes_on = [&sequence] {
    return sequence.phase == Sequence::Phase::kRunning && sequence.request->failure.ok();
  };
  size_t accepted = 0;  // guesses that have brought one more token
  size_t right = 0;     // guesses that have become tokens
  while (true) {
    const bool is_right =
        accepted < guesses.size() && draws[accepted].token.id == guesses[accepted];
    right += is_right ? 1 : 0;
    sequence.num_accepted_tokens += is_right && were_candidates ? 1 : 0;
    CommitToken(sequence, draws[accepted]);
    if (!is_right || !goes_on()) break;
    ++accepted;
    ++sequence.num_cached;
    ++sequence.num_pending;
    sequence.num_accepted_tokens += were_candidates ? 0 : 1;
  }
  if (guesses.empty()) return;
  if (goes_on()) scheduler_.DropGuesses(sequence);
  guesser_->Settle(sequence, {.guesses = guesses.size(), .right = right, .accepted = accepted});
}

void RequestTable::CommitCandidate(Sequence& sequence, const LogProbResult& draw) {
  --sequence.num_pending;
  --sequence.num_pending_candidates;
  // It has been preempted, or this was drawn behind its last candidate.
  if (sequence.phase != Sequence::Phase::kRunning || sequence.candidates_end) {
    return guesser_->Drop(1);
  }
  // Whether the logits are finite is for the contract to say.
  if (draw.finite) sequence.candidates.push_back(draw.token.id);
  sequence.candidates_end = !draw.finite || sequence.sampling->IsStop(draw.token.id);
}

void RequestTable::CommitToken(Sequence& sequence, LogProbResult& result) {
  Request& request = *sequence.request;
  if (!result.finite || !std::isfinite(result.token.logprob)) {
    request.failure = absl::InternalError(absl::StrCat(
        "sample ", sequence.sample, ": the logits at position ", sequence.tokens.size(),
        " (completion token ", sequence.sampling->num_completion_tokens(), ") are not finite"));
    return;
  }
  const int32_t token = result.token.id;
  --sequence.num_pending;
  sequence.tokens.push_back(token);
  sequence.sampling->Append(token);
  if (sequence.weights != version_) sequence.weights = version_;
  outbox_.push_back(TokenEmission{.sink = request.sink.get(),
                                  .sample = sequence.sample,
                                  .token = {.id = token,
                                            .logprob = result.token.logprob,
                                            .weight_version = version_->id,
                                            .top = WithoutUnused(std::move(result.top))}});
  if (sequence.sampling->IsStop(token)) {
    EndSequence(sequence, {.reason = FinishReason::kStop, .stop_token = token});
  } else if (sequence.sampling->num_completion_tokens() == request.max_tokens) {
    EndSequence(sequence, {.reason = FinishReason::kLength});
  }
}

void RequestTable::CloseFinished(absl::Span<Sequence* const> sequences) {
  for (const Sequence* sequence : sequences) {
    const Request& request = *sequence->request;
    if (request.failure.ok() && request.num_unfinished > 0) continue;
    const auto it = requests_.find(request.ticket);
    if (it != requests_.end()) Close(it, request.failure);  // else: closed by an earlier sample
  }
}

std::vector<std::string> RequestTable::ids() const {
  std::vector<std::string> ids;
  for (const auto& [ticket, request] : requests_) ids.push_back(request->id);
  return ids;
}

size_t RequestTable::num_with_cache() const {
  const auto has_cache = [](const auto& sequence) { return sequence->num_cached > 0; };
  return static_cast<size_t>(
      std::count_if(requests_.begin(), requests_.end(), [&](const auto& entry) {
        const auto& samples = entry.second->samples;
        return std::any_of(samples.begin(), samples.end(), has_cache);
      }));
}

void RequestTable::EndSequence(Sequence& sequence, SampleEnd end) {
  Request& request = *sequence.request;
  scheduler_.Remove(sequence);
  --request.num_unfinished;
  end.num_prompt_tokens = request.num_prompt_tokens;
  end.num_completion_tokens =
      static_cast<uint32_t>(sequence.tokens.size()) - request.num_prompt_tokens;
  end.seed = request.seed;
  end.weight_version = sequence.weights != nullptr ? *sequence.weights : *version_;
  end.num_preemptions = sequence.num_preemptions;
  end.num_cached_prompt_tokens = sequence.num_cached_prompt_tokens;
  end.num_draft_tokens = sequence.num_draft_tokens;
  end.num_accepted_tokens = sequence.num_accepted_tokens;
  outbox_.push_back([sink = request.sink, sample = sequence.sample, end = std::move(end)] {
    sink->OnSampleEnd(sample, end);
  });
  if (guesser_ != nullptr) guesser_->End(sequence);
  // The request's other samples may run for a long time.
  sequence.tokens = {};
  if (sequence.sampling != nullptr) ended_.samplings.push_back(std::move(sequence.sampling));
}

RequestTable::Requests::iterator RequestTable::Abort(Requests::iterator it,
                                                     const std::string& reason) {
  for (const auto& sequence : it->second->samples) {
    if (sequence->phase == Sequence::Phase::kFinished) continue;
    EndSequence(*sequence, {.reason = FinishReason::kAbort, .abort_reason = reason});
  }
  return Close(it, absl::OkStatus());
}

RequestTable::Requests::iterator RequestTable::Close(Requests::iterator it,
                                                     const absl::Status& status) {
  Request& request = *it->second;
  for (const auto& sequence : request.samples) {
    if (sequence->phase != Sequence::Phase::kFinished) scheduler_.Remove(*sequence);
  }
  outbox_.push_back([sink = request.sink, status] { sink->OnDone(status); });
  tickets_.erase(request.id);
  ended_.requests.push_back(std::move(it->second));
  return requests_.erase(it);
}

}  // namespace isobit
