"""Tests of chat templates: their environment, options, masks and errors.

python tests/python/chat_template_test.py        (in an environment where the package `isobit` is installed)

chat_templates/ has templates that use every feature; expected.json has transformers 5.24's renderings of
them, as chat_template_comparison.py recorded them. That script compares any templates with transformers
itself.
"""

import dataclasses
import datetime
import enum
import json
import tempfile
import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from chat_template_comparison import CONVERSATIONS, OPTIONS, TOOLS, digest, write_model

from isobit import Tokenizer

TEMPLATES = Path(__file__).resolve().parent / "chat_templates"
CHATML = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}"
    "{% endgeneration %}{% else %}{{ message['content'] + eos_token }}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "é 🙂"}


class ChatTemplateTest(unittest.TestCase):
    def tokenizer(self, template: str) -> Tokenizer:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        write_model(Path(scratch.name), template)
        return Tokenizer(scratch.name)

    def render(self, template: str, messages="hi", **options) -> str:
        return self.tokenizer(template).render_chat(messages, **options)

    def test_renderings_are_those_of_transformers(self):
        expected = json.loads((TEMPLATES / "expected.json").read_text("utf-8"))
        self.assertEqual({path.stem for path in TEMPLATES.glob("*.jinja")}, set(expected))
        for name, conversations in expected.items():
            tokenizer = self.tokenizer((TEMPLATES / f"{name}.jinja").read_text("utf-8"))
            self.assertEqual(set(conversations), set(CONVERSATIONS))
            for conversation, digests in conversations.items():
                for option, wanted in digests.items():
                    with self.subTest(template=name, conversation=conversation, options=option):
                        try:
                            text = tokenizer.render_chat(CONVERSATIONS[conversation], **OPTIONS[option])
                        except (TypeError, ValueError) as error:
                            self.assertEqual("refused", wanted, error)
                        else:
                            self.assertEqual(digest(text), wanted, text)

    def test_chat_follows_the_template(self):
        tokenizer = self.tokenizer(CHATML)
        text = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
        self.assertEqual(tokenizer.render_chat("hi"), text)
        ids = tokenizer.encode_chat([USER])
        self.assertEqual(tokenizer.decode(ids, skip_special_tokens=False), text)
        self.assertEqual(np.count_nonzero(ids >= 256), 3)
        shorter = tokenizer.encode_chat([USER], add_generation_prompt=False)
        self.assertEqual(len(ids) - len(shorter), 1 + len("assistant\n"))

    def test_messages_mean_what_they_do_in_transformers(self):
        template = (
            "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]"
            "{% endif %}{{ m.content }}{% for c in m.tool_calls or () %}({{ c.function.name }}){% endfor %}"
            "{% if m.tool_calls is defined %}!{% endif %}{% endfor %}"
        )
        said = {"role": "assistant", "content": "4"}
        call = {"type": "function", "function": {"name": "clock", "arguments": {}}}

        @dataclasses.dataclass
        class Turn:
            role: str
            content: object
            tool_calls: object = None

        @dataclasses.dataclass
        class Function:
            name: str

        class Role(str, enum.Enum):
            USER = "user"

        class Model:  # as pydantic's
            def model_dump(self):
                return {"role": Role.USER, "content": "hi", "reasoning": None}

        for messages, expected in (
            ([said | {"reasoning": "hm"}], "<assistant>[hm]4"),
            ([said | {"thinking": "hm"}], "<assistant>[hm]4"),
            ([said | {"thinking": "b", "reasoning": "a", "reasoning_content": None}], "<assistant>[b]4"),
            ([said | {"content": None, "tool_calls": [call]}], "<assistant>(clock)!"),
            ([said | {"tool_calls": None}], "<assistant>4"),
            (
                [Turn("user", "hi"), Turn("assistant", "", [{"function": Function("clock")}])],
                "<user>hi<assistant>(clock)!",
            ),
            ([Model()], "<user>hi"),
            ((said, said), "<assistant>4<assistant>4"),
            (types.SimpleNamespace(messages=[said]), "<assistant>4"),
        ):
            with self.subTest(expected):
                self.assertEqual(self.render(template, messages, add_generation_prompt=False), expected)
        texts = {
            name: self.render(f"{{{{ messages[0].{name} }}}}", [said | {"reasoning": "hm"}])
            for name in ("thinking", "reasoning", "reasoning_content")
        }
        self.assertEqual(set(texts.values()), {"hm"})
        continued = self.render(
            "<think>{{ messages[0].reasoning_content }}</think>",
            [said | {"reasoning": "so"}],
            continue_final_message="reasoning",
        )
        self.assertEqual(continued, "<think>so")
        # What is no text stays out of a template's reach.
        block = {
            "role": "user",
            "content": [{"type": "image", "image": np.zeros(2)}, {"type": "text", "n": np.int64(3)}],
        }
        text = self.render(
            "{{ messages[0].content[0].image }} {{ messages[0].content[1].n + 1 }} {{ x }}",
            [block],
            x=Role.USER,
        )
        self.assertEqual(text, "<ndarray> 4 user")

    def test_environment(self):
        for template, expected in (
            ("{{ {'b': '<é&>', 'a': [1, none]} | tojson }}", '{"b": "<é&>", "a": [1, null]}'),
            ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
            ("{{ ['é'] | tojson(ensure_ascii=true, indent=1) }}", '[\n "\\u00e9"\n]'),
            (
                "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
                "{% if i == 3 %}{% break %}{% endif %}{% endfor %}",
                "023",
            ),
            ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
            ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
            ("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}", "True True True"),
            ("{{ color }}{{ nothing is defined }}", "redFalse"),
            ("{{ dict(a=1).a }}{{ dict.fromkeys([2], 3) }}", "1{2: 3}"),
            ("{% set n = namespace(self=1) %}{% set n.x = 2 %}{{ n.self + n.x }}", "3"),
            ("{% set n = namespace(_x=1) %}", None),
            ("{{ messages.append(1) }}", None),
            ("{{ ''.__class__ }}", ""),
            ("{{ ''.__class__.__mro__ }}", None),
        ):
            with self.subTest(template=template):
                if expected is None:
                    with self.assertRaisesRegex(
                        ValueError, "the chat template refuses.*(unsafe|safe|underscore)"
                    ):
                        self.render(template)
                else:
                    self.assertEqual(self.render(template, color="red"), expected)

    def test_today(self):
        days = {str(datetime.date.today())}
        rendered = self.render("{{ strftime_now('%Y-%m-%d') }}")
        self.assertIn(rendered, days | {str(datetime.date.today())})

    def test_tools_and_documents(self):
        template = "{{ tools | tojson }} {{ documents | map(attribute='title') | join(', ') }}"
        text = self.render(template, tools=TOOLS, documents=[{"title": "a"}, {"title": "b"}])
        self.assertEqual(text, json.dumps(TOOLS, ensure_ascii=False) + " a, b")
        for options, message in (
            ({"tools": [len]}, r"tools\[0\] is a function: give its JSON schema"),
            ({"tools": ["clock"]}, r"tools\[0\] is of type str, expected a dict"),
            ({"tools": TOOLS[0]}, "tools is of type dict, expected a list of dicts"),
            ({"documents": ["text"]}, r"documents\[0\] is of type str"),
            ({"messages": [[USER]]}, r"messages\[0\] is of type list"),
            ({"messages": USER}, "messages is of type dict"),
            ({"messages": iter([USER])}, "messages is of type list_iterator"),
            ({"messages": [USER, len]}, r"messages\[1\] is of type builtin_function_or_method"),
        ):
            with self.subTest(options=options), self.assertRaisesRegex(TypeError, message):
                self.render(template, **options)

    def test_the_final_message_can_be_continued(self):
        tokenizer = self.tokenizer(CHATML)
        text = tokenizer.render_chat([USER, ANSWER], continue_final_message=True)
        self.assertEqual(text, "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\né 🙂")
        self.assertEqual(ANSWER["content"], "é 🙂")
        spaced = [{"role": "user", "content": " a \n"}]
        text = self.render("{{ messages[0].content | trim }}<end>", spaced, continue_final_message=True)
        self.assertEqual(text, "a")
        blocks = {"role": "assistant", "content": [{"type": "text", "text": "so"}, {"type": "image"}]}
        text = self.render("{{ messages[0].content[0].text }}.", [blocks], continue_final_message="content")
        self.assertEqual(text, "so")
        for message, template, options in (
            ("exclude each other", CHATML, {"add_generation_prompt": True}),
            ("does not use 'reasoning'", CHATML, {"continue_final_message": "reasoning"}),
            ("leaves it out", "{{ messages[0].role }} content", {}),
        ):
            with self.subTest(message=message), self.assertRaisesRegex(ValueError, message):
                last = {**ANSWER, "reasoning": "hm"}
                self.render(template, [last], **({"continue_final_message": True} | options))
        with self.assertRaisesRegex(ValueError, "has no 'content' to continue"):
            self.render(CHATML, [{"role": "user"}], continue_final_message=True)

    def test_the_mask_has_what_the_assistant_said(self):
        tokenizer = self.tokenizer(CHATML)
        chat = tokenizer.encode_chat_with_mask([USER, ANSWER, USER, {**ANSWER, "content": ""}])
        self.assertEqual((chat.token_ids.dtype, chat.assistant_mask.dtype), (np.int32, bool))
        said = tokenizer.decode(chat.token_ids[chat.assistant_mask], skip_special_tokens=False)
        self.assertEqual(said, "é 🙂<|im_end|><|im_end|>")
        plain = self.tokenizer("{{ messages[0].content }}").encode_chat_with_mask([USER])
        self.assertEqual((plain.token_ids.size, plain.assistant_mask.any()), (2, False))

    def test_masks_of_threads_are_their_own(self):
        tokenizer = self.tokenizer(CHATML)

        def count(length: int) -> int:
            messages = [USER, {"role": "assistant", "content": "a" * length}]
            return int(tokenizer.encode_chat_with_mask(messages).assistant_mask.sum())

        with ThreadPoolExecutor(8) as pool:
            self.assertEqual(list(pool.map(count, range(1, 200))), list(range(2, 201)))

    def test_errors_say_what_is_wrong(self):
        for template, message in (
            ("{{ raise_exception('no tools here') }}", "refuses the messages: no tools here"),
            ("{% for %}", "not valid Jinja, line 1"),
            ("\n{{ messages | nofilter }}", "not valid Jinja, line 2.*nofilter"),
            ("{{ messages[0].content + 1 }}", "fails on the messages: TypeError"),
            ("{{ nothing.more }}", "refuses the messages: 'nothing' is undefined"),
            ("{{ nothing | tojson }}", "fails on the messages: TypeError.*JSON"),
            ("{% include 'x' %}", "fails on the messages"),
            ("{{ 10**(10**9) }}", "takes more than 0.5 s of processor time"),
            ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "fails on the messages: RecursionError"),
        ):
            with self.subTest(template=template), self.assertRaisesRegex(ValueError, message):
                self.render(template)
        with self.assertRaisesRegex(ValueError, "messages is empty"):
            self.render(CHATML, [])


if __name__ == "__main__":
    unittest.main()
