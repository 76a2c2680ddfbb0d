// The names that other servers give to our flags, and the edit distance between two names.
#include "common/config/flag_hints.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace isobit {
namespace {

// What vLLM, SGLang and PyTorch's launchers call what a flag of ours sets. Several of ours: the
// first that a program has.
constexpr std::pair<absl::string_view, absl::string_view> kOtherNames[] = {
    {"api_key", "access_file"},
    {"cert", "tls_cert"},
    {"chunked_prefill_size", "max_batch_tokens"},
    {"context_length", "max_context"},
    {"device", "backend"},
    {"disable_radix_cache", "noprefix_sharing"},
    {"download_dir", "model_root"},
    {"dp_size", "shards"},
    {"enable_prefix_caching", "prefix_sharing"},
    {"enforce_eager", "nocuda_graphs"},
    {"gpu_memory_utilization", "gpu_memory_fraction"},
    {"key", "tls_key"},
    {"max_model_len", "max_context"},
    {"max_num_batched_tokens", "max_batch_tokens"},
    {"max_num_seqs", "max_running"},
    {"max_num_seqs", "max_sequences"},
    {"max_prefill_tokens", "max_batch_tokens"},
    {"max_queued_requests", "max_waiting"},
    {"max_running_requests", "max_running"},
    {"mem_fraction_static", "gpu_memory_fraction"},
    {"model_path", "model"},
    {"no_enable_prefix_caching", "noprefix_sharing"},
    {"nnodes", "world_size"},
    {"node_rank", "rank"},
    {"num_gpu_blocks_override", "num_pages"},
    {"num_speculative_tokens", "speculation_max_tokens"},
    {"served_model_name", "model"},
    {"speculative_algorithm", "speculation"},
    {"speculative_config", "speculation"},
    {"ssl_ca_certs", "tls_client_ca"},
    {"ssl_certfile", "tls_cert"},
    {"ssl_keyfile", "tls_key"},
    {"tensor_parallel_size", "shards"},
    {"tensor_parallel_size", "tp_size"},
    {"tp", "shards"},
    {"tp", "tp_size"},
    {"tp_size", "shards"},
    {"block_size", "page_size"},
};

// Letters to insert, delete or replace, or neighbours to swap.
size_t Distance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> before_last;
  std::vector<size_t> last(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    std::vector<size_t> now(b.size() + 1, i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      now[j] = std::min({replaced, last[j] + 1, now[j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) now[j] = std::min(now[j], before_last[j - 2] + 1);
    }
    before_last = std::exchange(last, std::move(now));
  }
  return last.back();
}

std::string Meant(const std::string& name, const std::vector<std::string>& known) {
  const auto has = [&](absl::string_view flag) {
    return std::find(known.begin(), known.end(), flag) != known.end();
  };
  if (has(name)) return name;
  for (const auto& [other, ours] : kOtherNames) {
    absl::string_view flag = ours;
    if (name == other && (has(flag) || (flag.substr(0, 2) == "no" && has(flag.substr(2))))) {
      return absl::StrCat(ours);
    }
  }
  const size_t bound = 1 + name.size() / 5;
  std::string nearest;
  size_t least = bound + 1;
  for (const std::string& flag : known) {
    for (const std::string& form : {flag, absl::StrCat("no", flag)}) {
      if (const size_t distance = Distance(name, form); distance < least) {
        least = distance;
        nearest = form;
      }
    }
  }
  return nearest;
}

}  // namespace

std::string FlagHint(absl::string_view name, const std::vector<std::string>& known) {
  constexpr size_t kLongest = 64;  // of a name that may have been meant
  if (name.empty() || name.size() > kLongest) return "";
  const std::string plain = absl::AsciiStrToLower(absl::StrReplaceAll(name, {{"-", "_"}}));
  const std::string meant = Meant(plain, known);
  return meant.empty() ? "" : absl::StrCat("; did you mean --", meant, "?");
}

}  // namespace isobit
