"""Compares isobit.Tokenizer with transformers' AutoTokenizer on every chat template under some folders.

    python tests/python/chat_template_comparison.py FOLDER...    (each *.jinja below; transformers 5.24)

Renders each template with each conversation and set of options below, the messages as dicts and as objects.
Both must give the same text, ids and assistant mask, or both must refuse. Prints the counts and every
difference; exits with 1 if there is one. Without transformers it says so and exits with 0. With --record FILE
it writes the digests of transformers' renderings, by template, conversation and options;
chat_templates/expected.json was made like this.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from isobit import Tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather <now> & "here", in °C',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Łódź, for one"},
                "days": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
                "unit": {"type": "string", "enum": ["C", "F"], "nullable": True},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def _call(arguments, **more):
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}, **more}


def _blocks(text):
    return [{"type": "text", "text": text}]


USER = {"role": "user", "content": '  What\'s <b>2 & 2</b>?\n\n"quoted" 🙂 é\t'}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "4.  "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [_call({"city": "Łódź", "days": [1]}, id="call00001")],
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"t": 3}'}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour.", "reasoning_content": "hm"}

CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "developer": [{"role": "developer", "content": "Be kind."}, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And 3?"}],
    "finished": [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "Six\n"}],
    "blocks": [
        {"role": "system", "content": _blocks("Be brief.")},
        {"role": "user", "content": _blocks("one ") + _blocks("two")},
        {"role": "assistant", "content": _blocks("three")},
    ],
    "image": [{"role": "user", "content": [{"type": "image", "image": "x"}, *_blocks("what is it?")]}],
    "tool call": [SYSTEM, USER, CALL, RESULT],
    "tool call, text arguments": [USER, {**CALL, "tool_calls": [_call('{"city": "Łódź"}', id="abcdefghi")]}],
    "tool calls": [
        USER,
        {**CALL, "content": None, "tool_calls": [_call({"city": "a"}, id="1" * 9), _call({}, id="2" * 9)]},
        RESULT,
        {**RESULT, "content": "plain & <text>"},
        ANSWER,
    ],
    "thought": [USER, THOUGHT, USER],
    "thinking": [USER, {"role": "assistant", "content": "4", "thinking": "hm"}],
    "reasoning": [USER, {"role": "assistant", "content": "4", "reasoning": "hm"}, USER],
    "reasoning twice": [
        USER,
        {"role": "assistant", "content": "4", "reasoning": "a", "thinking": "b", "reasoning_content": None},
    ],
    "reasoning and a call": [USER, {**CALL, "thinking": "hm", "content": "Let me see."}, RESULT],
    "fields that are none": [
        {**USER, "name": None, "tool_calls": None},
        {**CALL, "content": None, "reasoning_content": None},
        {**RESULT, "name": None},
        {"role": "assistant", "content": "4", "tool_calls": None, "refusal": None},
    ],
    "two users": [USER, USER],
    "unknown role": [{"role": "observer", "content": "hm"}, USER],
    "no content": [{"role": "user"}],
    "none": [],
}
TOOLS = [WEATHER, CLOCK]
DOCUMENTS = [{"title": "Sums & <more>", "text": "2+2=4"}, {"title": "ü", "text": "…", "id": 7}]
OPTIONS = {
    "plain": {"add_generation_prompt": False},
    "prompt": {"add_generation_prompt": True},
    "tools": {"add_generation_prompt": True, "tools": TOOLS},
    "no tools": {"add_generation_prompt": True, "tools": []},
    "documents": {"add_generation_prompt": True, "documents": DOCUMENTS, "citation_mode": "fast"},
    "no thinking": {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May 2025"},
    "arguments": {
        "add_generation_prompt": True,
        "bos_token": "<B>",
        "enable_thinking": True,
        "thinking": True,
    },
    "continue": {"add_generation_prompt": False, "continue_final_message": True},
    "continue content": {"add_generation_prompt": False, "continue_final_message": "reasoning_content"},
    "both": {"add_generation_prompt": True, "continue_final_message": True},
}


def write_model(directory: Path, template: str) -> None:
    """Makes `directory` a byte-level tokenizer with this chat template, as transformers 5 saves one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([*SPECIAL_TOKENS.values(), "<|im_start|>"])
    raw.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def as_objects(value):
    """`value` with an object of a dataclass for each dict."""
    if isinstance(value, list):
        return [as_objects(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = dataclasses.make_dataclass("Turn", list(value))
    return kind(**{name: as_objects(item) for name, item in value.items()})


def digest(text: str) -> str:
    """A rendering as expected.json holds it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ours(directory: Path):
    """isobit's result for a conversation: text, ids and mask, or the error."""
    tokenizer = Tokenizer(directory)

    def render(messages, options):
        try:
            text = tokenizer.render_chat(messages, **options)
            ids = tokenizer.encode_chat(messages, **options).tolist()
            if options.get("continue_final_message") or options["add_generation_prompt"]:
                return text, ids, None
            mask = tokenizer.encode_chat_with_mask(messages)
            return text, ids, (mask.token_ids.tolist(), mask.assistant_mask.astype(int).tolist())
        except (TypeError, ValueError) as error:
            return f"refused: {error}"

    return render


def theirs(directory: Path):
    """transformers' result for it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def render(messages, options):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
            if options.get("continue_final_message") or options["add_generation_prompt"]:
                return text, ids, None
            mask = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )
            return text, ids, (mask["input_ids"], mask["assistant_masks"])
        except Exception as error:  # transformers passes on whatever the template raises
            return f"refused: {type(error).__name__}: {error}"

    return render


def compare(template: Path, counts: dict[str, int], record: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), template.read_text("utf-8"))
        try:
            reference = theirs(Path(folder))
            mine = ours(Path(folder))
        except ValueError as error:
            counts["unequal"] += 1
            print(f"{template}: {error}")
            return
        # As they come from JSON, no message shared: transformers would mark each copy of one to continue.
        for conversation, messages in json.loads(json.dumps(CONVERSATIONS)).items():
            for name, options in OPTIONS.items():
                expected = reference(messages, options)
                digests = record.setdefault(template.stem, {}).setdefault(conversation, {})
                digests[name] = "refused" if isinstance(expected, str) else digest(expected[0])
                tell(counts, f"{template}: {conversation}, {name}", expected, mine(messages, options))
                objects = as_objects(messages)
                expected, got = reference(objects, options), mine(objects, options)
                tell(counts, f"{template}: {conversation} of objects, {name}", expected, got)


def tell(counts: dict[str, int], what: str, expected, got) -> None:
    """Counts a comparison, and prints what differs."""
    refused = isinstance(expected, str), isinstance(got, str)
    kind = "refused by both" if all(refused) else "equal" if expected == got else "unequal"
    counts[kind] += 1
    if kind == "unequal":
        print(f"{what}:\n  theirs {expected!r}\n  ours   {got!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--record", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError:
        print("skipped: transformers is not installed")
        return 0
    logging.getLogger("transformers").setLevel(logging.ERROR)
    templates = sorted(path for folder in arguments.folders for path in folder.rglob("*.jinja"))
    counts, record = {"equal": 0, "refused by both": 0, "unequal": 0}, {}
    for template in templates:
        compare(template, counts, record)
    if arguments.record:
        arguments.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"transformers {transformers.__version__}: {len(templates)} templates, renderings: {counts}")
    return 1 if counts["unequal"] or not templates else 0


if __name__ == "__main__":
    sys.exit(main())
