// What an operator accepts at a load although isobit then does not compute what the files say.
#ifndef ISOBIT_COMMON_CHECKPOINT_LOAD_POLICY_H_
#define ISOBIT_COMMON_CHECKPOINT_LOAD_POLICY_H_

#include <string>
#include <vector>

namespace isobit {

struct LoadPolicy {
  // Fields of config.json to ignore, for instance "auto_map" or "rope_scaling.beta". A name that
  // the config does not have is no error; naming a field that must never be ignored is one
  // (config_fields.h).
  std::vector<std::string> ignored_fields;

  // Accept that fp16 weights are rounded to bf16. This loses three bits of each weight, which
  // transformers and vLLM keep. (Weights of fp32 are always rounded: no serving engine keeps them.)
  bool round_fp16 = false;

  // Accept NaNs and infinities in the bf16 weights. Every logprob may then be a NaN.
  bool allow_nonfinite = false;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_LOAD_POLICY_H_
