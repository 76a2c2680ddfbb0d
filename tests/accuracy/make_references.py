"""Makes the reference logprobs with which the accuracy tests compare the engine's.

    pip install -r tests/accuracy/requirements.txt
    python tests/accuracy/make_references.py \
        --model tiny-qwen3=models/tiny-qwen3 --model smollm2=models/smollm2-135m-instruct

Each model is a Hugging Face directory. Transformers runs it on the CPU with eager attention, once in fp32
and once in bf16, over fixed sequences: real text if the directory has a tokenizer, else random ids of a
fixed seed. The result is tests/accuracy/references/<name>.json:

    architecture, weights_sha256   which model this is: SHA-256 over its *.safetensors files in name order
    torch, transformers            the versions that computed it
    sequences                      prompt, completion: token ids; logprobs: of each completion token at
                                   temperature 1, raw, by the fp32 run
    bf16_error                     |bf16 run - fp32 run| of those logprobs: tokens, max, mean, rms
    greedy                         text, prompt, and the greedy continuations bf16 and fp32, as token ids;
                                   only for a model with a tokenizer

The fp32 run counts as exact. bf16_error is how far a plain bf16 implementation is from it, which bounds the
engine's error. The outputs are in the repository, so that the tests need no torch.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

REFERENCES = Path(__file__).resolve().parent / "references"
SEED = 20251

# Lengths of prompt and completion of the random sequences: a single token, ragged ones, and prompts longer
# than any tile, page or sliding window of the tiny models.
RANDOM_SHAPES = ((1, 40), (17, 100), (64, 64), (130, 70))

PASSAGES = (
    "The river rises in the high moors, where rain falls on more than two hundred days of the year. From"
    " there it runs south through a narrow valley, past two old mills and a village of grey stone houses,"
    " before it widens and slows among the water meadows. In spring the meadows flood, and thousands of"
    " geese come to feed on them; by late summer the same fields are dry enough to cut for hay. The last"
    " mill closed in 1931, but its wheel still turns on market days.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    previous, current = 0, 1\n"
    "    for _ in range(n - 1):\n        previous, current = current, previous + current\n"
    "    return current\n\n\nprint([fibonacci(n) for n in range(10)])\n",
    "Water boils at 100 degrees Celsius at sea level, but at the top of a high mountain the air presses less"
    " and it boils sooner: at 3,000 metres, at about 90 degrees. That is why cooking pasta takes longer in"
    " the mountains, although the water bubbles just as hard.",
)
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "What is 2 + 3?",
    "Name three animals that live in the forest.",
    "How do I make a cup of tea?",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet, and when?",
)


def weights_sha256(directory: Path) -> str:
    """SHA-256 over the bytes of all *.safetensors files, in name order."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def load(directory: Path, dtype: torch.dtype):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def random_sequences(config) -> list[tuple[list[int], list[int]]]:
    """Pairs of prompt and completion ids, equal for equal vocabularies."""
    generator = np.random.default_rng(SEED)
    longest = max(prompt + completion for prompt, completion in RANDOM_SHAPES)
    if config.max_position_embeddings < longest:
        raise ValueError(
            f"max_position_embeddings is {config.max_position_embeddings}, expected >= {longest}"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window >= RANDOM_SHAPES[-1][0]:
        raise ValueError(f"sliding_window is {window}, expected < {RANDOM_SHAPES[-1][0]}, to be seen at work")
    pairs = []
    for prompt, completion in RANDOM_SHAPES:
        ids = generator.integers(0, config.vocab_size, prompt + completion).tolist()
        pairs.append((ids[:prompt], ids[prompt:]))
    return pairs


def text_sequences(tokenizer) -> list[tuple[list[int], list[int]]]:
    """PASSAGES as pairs of prompt and completion ids: the first eighth is the prompt."""
    rows = [tokenizer(passage)["input_ids"] for passage in PASSAGES]
    return [(ids[: len(ids) // 8], ids[len(ids) // 8 :]) for ids in rows]


@torch.inference_mode()
def completion_logprobs(model, prompt: list[int], completion: list[int]) -> np.ndarray:
    """The raw logprob of each completion token; float32 [completion]."""
    ids = torch.tensor([prompt + completion])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@torch.inference_mode()
def greedy_continuation(model, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
    )
    return output[0, len(prompt) :].tolist()


def error_summary(errors: np.ndarray) -> dict:
    return {
        "tokens": errors.size,
        "max": float(errors.max()),
        "mean": float(errors.mean()),
        "rms": float(np.sqrt(np.mean(np.square(errors)))),
    }


def make_reference(directory: Path, max_tokens: int) -> dict:
    """The content of one reference file."""
    fp32, bf16 = load(directory, torch.float32), load(directory, torch.bfloat16)
    tokenizer, greedy = None, []
    if (directory / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    pairs = random_sequences(fp32.config) if tokenizer is None else text_sequences(tokenizer)
    for question in QUESTIONS if tokenizer is not None else ():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        continuations = {
            name: greedy_continuation(model, prompt, max_tokens)
            for name, model in (("bf16", bf16), ("fp32", fp32))
        }
        print(f"  {question}\n    {tokenizer.decode(continuations['bf16'])!r}", flush=True)
        greedy.append({"text": question, "prompt": prompt, **continuations})
        pairs.append((prompt, continuations["bf16"]))

    sequences, errors = [], []
    for prompt, completion in pairs:
        truth = completion_logprobs(fp32, prompt, completion)
        errors.append(np.abs(completion_logprobs(bf16, prompt, completion).astype(np.float64) - truth))
        # The shortest decimal that gives the same fp32.
        logprobs = [float(str(value)) for value in truth]
        sequences.append({"prompt": prompt, "completion": completion, "logprobs": logprobs})
    reference = {
        "architecture": fp32.config.architectures[0],
        "weights_sha256": weights_sha256(directory),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bf16_error": error_summary(np.concatenate(errors)),
        "sequences": sequences,
    }
    return reference | ({"greedy": greedy} if greedy else {})


def write_reference(reference: dict, path: Path) -> None:
    """Writes JSON with one line to each key or list entry, so that a diff shows what changed."""
    lines = []
    for key, value in reference.items():
        if isinstance(value, list):
            entries = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
            lines.append(f"  {json.dumps(key)}: [\n{entries}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes reference logprobs with transformers.")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIRECTORY")
    parser.add_argument("--output", type=Path, default=REFERENCES, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=48, help="of a greedy continuation; %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for model in arguments.model:
        name, separator, directory = model.partition("=")
        if not separator:
            parser.error(f"--model is {model}, expected NAME=DIRECTORY")
        print(f"{name}: {directory}", flush=True)
        reference = make_reference(Path(directory), arguments.max_tokens)
        write_reference(reference, arguments.output / f"{name}.json")
        print(f"  bf16 error: {reference['bf16_error']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
