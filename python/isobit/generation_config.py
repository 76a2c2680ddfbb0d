"""The sampling parameters that a model directory recommends.

    rollout.generate(prompt_ids, **sampling_defaults("models/my-model"))

They are used only in this way: a service samples with the parameters of the request and its own defaults.
"""

import json
from pathlib import Path

from isobit.arguments import file_of_model
from isobit.sampling import SamplingOptions, to_proto

_FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Greedy decoding uses none of these.
_FILTERS = ("top_p", "top_k", "min_p")
# Fields that isobit lacks and that can change the output, each with the values that change nothing. A field
# that is not in any of these lists is refused, too, since a later transformers may have added it.
_NOT_OFFERED = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "stop_strings": ([],),
    "min_length": (0,),
    "num_return_sequences": (1,),
    "token_healing": (False,),
    "max_time": (),
    "force_words_ids": ([],),
    "forced_decoder_ids": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "assistant_ensemble_weight": (),
}
# Fields that change no token, or only together with a field that is refused: padding, the first token of a
# prompt, and how transformers searches with beams, caches, compiles, drafts tokens and returns results.
_INERT = frozenset((
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "max_length", "early_stopping",
    "length_penalty", "low_memory", "renormalize_logits", "remove_invalid_values", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "prefill_chunk_size",
    "compile_config", "disable_compile", "continuous_batching_config", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "is_assistant",
    "use_mtp", "speculation_type", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "transformers_version",
))  # fmt: skip


def sampling_defaults(model_dir: str | Path) -> SamplingOptions:
    """Returns the sampling parameters in `model_dir`'s generation_config.json, as keyword arguments.

    `do_sample: false` gives temperature 0 and no filters. `eos_token_id` gives stop_token_ids,
    `max_new_tokens` max_tokens and `min_new_tokens` min_tokens. Every other field that can change a token,
    and every unknown field, is an error, unless its value changes nothing. For parameters that the file does
    not name, the services' own defaults hold (temperature 1, no filter, 16 tokens), not those of transformers
    (greedy, top_k 50). `max_length` is ignored, since it counts the prompt, too.

    Raises:
      FileNotFoundError: `model_dir` has no generation_config.json.
      ValueError: the file is not a JSON object, a value has a wrong type or is out of range, or a field asks
        for something that isobit does not do, such as beams. The message names file and field.
    """
    path = file_of_model(model_dir, _FILE)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the model recommends no sampling parameters")
    try:
        return _options(json.loads(path.read_text("utf-8")))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _options(config: dict) -> SamplingOptions:
    if not isinstance(config, dict):
        raise TypeError(f"the file holds a {type(config).__name__}, expected a JSON object")
    for name, inert in _NOT_OFFERED.items():
        if (value := config.get(name)) is not None and value not in inert:
            raise ValueError(f"{name} is {value!r}, which isobit does not offer")
    known = {*_NOT_OFFERED, *_NAMES, *_INERT, "do_sample", "eos_token_id"}
    for name, value in config.items():
        if name not in known and not name.startswith("_") and value not in (None, False, [], {}):
            raise ValueError(f"{name} is {value!r}, a field that isobit does not know")
    options = {name: config[key] for key, name in _NAMES.items() if config.get(key) is not None}
    do_sample = config.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise TypeError(f"do_sample is {do_sample!r}, expected true or false")
    if do_sample is False:
        options = {name: value for name, value in options.items() if name not in _FILTERS}
        options["temperature"] = 0.0
    if (eos := config.get("eos_token_id")) is not None:
        options["stop_token_ids"] = list(eos) if isinstance(eos, list) else [eos]
    to_proto(options)
    return options
