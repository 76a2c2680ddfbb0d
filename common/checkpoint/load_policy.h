// What an operator lets pass at a load although isobit does not compute it as the files state it.
#ifndef ISOBIT_COMMON_CHECKPOINT_LOAD_POLICY_H_
#define ISOBIT_COMMON_CHECKPOINT_LOAD_POLICY_H_

#include <string>
#include <vector>

namespace isobit {

struct LoadPolicy {
  // Fields of config.json, "auto_map" or "rope_scaling.beta", whose statement may be left out. A
  // name that no config has is no error; those that may never be ignored are (config_fields.h).
  std::vector<std::string> ignored_fields;

  // Weights of fp16 may be rounded to bf16, which loses three bits of each that transformers and
  // vLLM keep. (Weights of fp32 are always rounded: no serving engine keeps them.)
  bool round_fp16 = false;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_LOAD_POLICY_H_
