"""A byte-level tokenizer with a chat template, for random tiny models."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 257  # <|im_end|>
# The template of a model that calls tools in Hermes' form.
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def write_tokenizer(directory: Path, merges: int = 200) -> None:
    """Writes a byte-level tokenizer: bytes, two special tokens, and `merges` pairs of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    pairs = [(a, b) for a in "etaoinsrhldcum" for b in "etaoinsrhldcum"][:merges]
    vocab |= {a + b: 258 + i for i, (a, b) in enumerate(pairs)}
    raw = Tokenizer(models.BPE(vocab=vocab | {"<|im_start|>": 256, "<|im_end|>": EOS}, merges=pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(fields | {"eos_token_id": EOS, "bos_token_id": 256}))
