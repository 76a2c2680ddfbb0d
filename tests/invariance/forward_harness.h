// Runs the model's forward pass on W rank threads in whatever schedule a test asks for, and returns
// every logit.
#ifndef ISOBIT_TESTS_INVARIANCE_FORWARD_HARNESS_H_
#define ISOBIT_TESTS_INVARIANCE_FORWARD_HARNESS_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/model_config.h"
#include "kernels/backend.h"
#include "kernels/contract/portable.h"
#include "kernels/model/transformer.h"

namespace isobit::invariance {

using Tokens = std::vector<int32_t>;
// Logits of one sequence: [length, vocab_size]; row i has the logits after tokens 0..i.
using SequenceLogits = std::vector<float>;

struct Schedule {
  int tp_size = 1;
  std::function<std::unique_ptr<Backend>()> make_ops;  // one for each rank
  // The first tokens of a sequence are prefilled in one step, the rest decoded `decode_rows` at a
  // time; 0: all in one step.
  int64_t prefill = 0;
  int64_t decode_rows = 1;
  // With several ranks, the fewest rows of a step that is computed in two halves.
  int64_t overlap_rows = std::numeric_limits<int64_t>::max();
  int32_t page_size = 16;
  bool scatter_pages = false;  // hand out pages in a scrambled order
  bool swap_first_pages =
      false;  // a control: after prefill, two sequences exchange their first pages
  // If set, [ranks]: every layer's keys, then values, as they are at the end.
  std::vector<std::vector<Bf16>>* caches = nullptr;
};

class ForwardHarness {
 public:
  // Stops the test program if the model cannot be loaded.
  explicit ForwardHarness(const std::string& model_directory);

  const ModelConfig& config() const { return config_; }

  // All sequences run together, in this order, and stay in the batch until each has ended.
  std::vector<SequenceLogits> Run(const std::vector<Tokens>& sequences,
                                  const Schedule& schedule) const;

  // `count` token ids from a seed.
  Tokens RandomTokens(int64_t count, uint32_t seed) const;

 private:
  ModelConfig config_;
  std::unique_ptr<Checkpoint> checkpoint_;
};

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_FORWARD_HARNESS_H_
