// The lists of config_fields.h; docs/API.md repeats the second one.
#include "common/checkpoint/config_fields.h"

#include <algorithm>
#include <iterator>

namespace isobit {
namespace {

// Defaults of generation, which transformers 5 drops when it reads a config.json.
constexpr absl::string_view kGeneration[] = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
};

constexpr absl::string_view kHarmless[] = {
    // Training.
    "attention_dropout",
    "attn_pdrop",
    "classifier_dropout",
    "embd_pdrop",
    "hidden_dropout",
    "initializer_range",
    "pretraining_tp",  // cuts the products in pieces, which changes only how transformers 4 rounds
    "resid_pdrop",
    // Of generate(), without a part in its tokens.
    "output_scores",
    "remove_invalid_values",
    "return_dict_in_generate",
    // Tokens and prompts, which are the client's business.
    "decoder_start_token_id",
    "model_max_length",
    "pad_token_id",
    "prefix",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    // Heads that a causal language model does not have.
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    // How transformers runs, caches, returns and stores.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "chunk_size_feed_forward",
    "gradient_checkpointing",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "tf_legacy_loss",
    "torchscript",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention_2",
    "use_return_dict",
    // Notes.
    "_commit_hash",
    "_name_or_path",
    "is_llama_config",
    "name_or_path",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
};

constexpr absl::string_view kNeverIgnored[] = {
    "architectures",     "compression_config",   "hidden_act",
    "is_causal",         "is_encoder_decoder",   "model_type",
    "per_layer_config",  "quantization",         "quantization_config",
    "rope_parameters",   "rope_scaling",         "rope_scaling.rope_type",
    "rope_scaling.type", "rope_parameters.type", "rope_parameters.rope_type",
};

}  // namespace

bool IsHarmlessField(absl::string_view name) {
  return IsGenerationField(name) ||
         std::find(std::begin(kHarmless), std::end(kHarmless), name) != std::end(kHarmless);
}

bool IsGenerationField(absl::string_view name) {
  return std::find(std::begin(kGeneration), std::end(kGeneration), name) != std::end(kGeneration);
}

bool IsNeverIgnoredField(absl::string_view name) {
  return std::find(std::begin(kNeverIgnored), std::end(kNeverIgnored), name) !=
         std::end(kNeverIgnored);
}

}  // namespace isobit
