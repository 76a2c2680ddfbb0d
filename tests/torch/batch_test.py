"""Batches, sampling and calls in transformers' form: what they refuse, and what they take."""

import math
import pickle
import unittest
from collections.abc import Callable
from typing import Any

import torch
from patch_test import make, sequences
from support import same_bits
from torch import Tensor

from isobit.torch import Batch, Sampling, logprobs, patch

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


class Refusals(unittest.TestCase):
    def refuses(self, message: str, call: Callable, *args: Any, error: type = ValueError, **kwargs: Any):
        with self.subTest(message), self.assertRaisesRegex(error, message):
            call(*args, **kwargs)


class BatchTest(Refusals):
    def test_tokens(self):
        message = r"sequences: expected integers \[length\] in each"
        wrong: list[Any] = [
            [1, 2, 3], [[1.5, 2.0]], [torch.tensor([1.0, math.nan])], [[True, False]],
            [torch.tensor([[1, 2], [3, 4]])],
        ]  # fmt: skip
        for tokens in wrong:
            self.refuses(message, Batch.of, tokens)
        self.refuses("expected tokens of at least 0, got -2", Batch.of, [[1, -2]])
        for tokens in (torch.tensor([[1, 2, 3]]), torch.tensor([1, 2, 3], dtype=torch.int32), (1, 2, 3)):
            self.assertEqual(Batch.of([tokens]).ids.tolist(), [1, 2, 3])

    def test_labels(self):
        rows = [[1, 2, 3], [4, 5]]
        self.refuses(r"labels: expected \[3, 2\], one a token; got \[2, 3\]", Batch.of, rows,
                     labels=[[1, 2], [3, 4, 5]])  # fmt: skip
        self.refuses("expected labels or prompt_lengths, got both", Batch.of, rows, labels=rows,
                     prompt_lengths=[1, 1])  # fmt: skip
        self.refuses("labels: expected tokens of at least 0, or -100, got -1", Batch.of, rows,
                     labels=[[1, -1, 3], [4, 5]])  # fmt: skip
        # Beyond the vocabulary, and beyond int32: a GPU would read memory that is not the weight's.
        for beyond in (97, 2**32 + 5):
            batch = Batch.of(rows, labels=[[1, 2, beyond], [4, 5]])
            self.refuses(f"ids and labels: expected 0 to 96, got {beyond}", logprobs, patch(make("Llama")),
                         batch)  # fmt: skip
        unscored = Batch.of(rows, labels=[[-7, 2, -100], [-1, 5]])  # first tokens have no predecessor
        self.assertEqual((unscored.scored.tolist(), unscored.targets.tolist()), ([0, 3], [2, 5]))

    def test_devices(self):
        torch.set_default_device("meta")
        try:
            batch = Batch.of([[1, 2, 3], [4, 5]])
        finally:
            torch.set_default_device(None)
        self.assertEqual(batch.targets.tolist(), [2, 3, 5])
        self.refuses("batch: expected tensors on cpu, where the model is, got meta", logprobs,
                     patch(make("Llama")), Batch.of([[1, 2]], device="meta"))  # fmt: skip

    def test_sampling(self):
        model, batch = patch(make("Llama")), Batch.of(sequences())
        for name, values in {
            "temperature": [math.nan, -1.0, math.inf, 1e-4, [0.7], [1.0] * 5],
            "top_k": [-2, 2.5, 10**10, [0] * 3],
            "top_p": [0.0, 1.5, -1.0, math.nan],
            "min_p": [-0.1, 1.5, math.nan],
        }.items():
            for value in values:
                self.refuses(f"{name}: expected", logprobs, model, batch, Sampling(**{name: value}))
        expected = logprobs(model, batch, Sampling(temperature=[0.5, 0.7, 1.0, 1.5])).logprobs
        given = Sampling(temperature=torch.tensor([0.5, 0.7, 1.0, 1.5]))
        self.assertTrue(same_bits(logprobs(model, batch, given).logprobs, expected))
        self.refuses("sampling: expected", logprobs, model, batch, 0.7, error=TypeError)
        self.refuses("batch: expected", logprobs, model, IDS, error=TypeError)


class CallTest(Refusals):
    @classmethod
    def setUpClass(cls):
        cls.model = patch(make("Llama"))

    def logits(self, **call: Any) -> Tensor:
        with torch.no_grad():
            return self.model(**call).logits

    def test_shapes(self):
        self.refuses(r"input_ids: expected the tokens \[sequences, length\], got \[4\]", self.model, IDS[0])
        self.refuses(r"input_ids: expected \[sequences, length\], got \[2, 0\]", self.model, IDS[:, :0])
        self.refuses("expected integers", self.model, IDS.float())
        for labels in (IDS[:, :3], IDS[:1], IDS[0]):
            self.refuses(r"labels: expected \[2, 4\], like input_ids", self.model, IDS, labels=labels)
        self.refuses("position_ids: expected 4 in each row, got 3", self.model, IDS,
                     position_ids=torch.arange(3)[None])  # fmt: skip
        self.refuses("position_ids: expected 0, 1, ... in each sequence", self.model, IDS[:1],
                     position_ids=torch.arange(1, 5)[None])  # fmt: skip
        self.refuses("cu_seq_lens_q: expected ascending bounds .* without padding", self.model, IDS[1:],
                     attention_mask=MASK[1:], cu_seq_lens_q=torch.tensor([0, 2, 4]))  # fmt: skip

    def test_what_it_cannot_give(self):
        for name in ("inputs_embeds", "token_type_ids"):
            self.refuses(f"{name}: not supported", self.model, IDS, **{name: IDS})
        self.refuses("output_hidden_states: not supported", self.model, IDS, output_hidden_states=True)
        self.refuses("labels: expected use_cache=False", self.model, IDS, labels=IDS, use_cache=True)
        model = patch(make("Llama"))
        model.config.output_hidden_states = True
        self.refuses("output_hidden_states: not supported", model, IDS)

    def test_forms_of_one_call(self):
        expected = self.logits(input_ids=IDS, attention_mask=MASK)
        self.assertEqual(expected[1, 3].abs().max(), 0)
        with torch.no_grad():
            as_tuple = self.model(IDS, MASK, return_dict=False)
        self.assertIsInstance(as_tuple, tuple)
        self.assertTrue(same_bits(as_tuple[0], expected))
        self.assertTrue(same_bits(self.logits(input_ids=IDS, attention_mask=MASK.bool(), logits_to_keep=2),
                                  expected[:, -2:]))  # fmt: skip
        packed = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}
        rows = torch.cat([expected[0], expected[1, :3]])[None]
        for how in (
            {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])},
            {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]), "attention_mask": torch.ones(1, 7)},
            {"cu_seq_lens_q": torch.tensor([0, 4, 7])},
        ):
            self.assertTrue(same_bits(self.logits(**packed, **how), rows))

    # What transformers' DataCollatorWithFlattening gives for flash attention.
    def test_bounds_of_keys(self):
        packed, bounds = torch.tensor([[5, 6, 7, 8, 9, 10, 11]]), torch.tensor([0, 4, 7], dtype=torch.int32)
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
        call = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 4, "max_length_k": 4}
        expected = self.logits(input_ids=packed, position_ids=positions)
        for how in (call, call | {"position_ids": positions}, {"cu_seq_lens_k": bounds}):
            self.assertTrue(same_bits(self.logits(input_ids=packed, **how), expected))
        self.refuses(r"cu_seq_lens_k: expected the bounds in cu_seq_lens_q, \[0, 4, 7\], got \[0, 3, 7\]",
                     self.model, packed, **call | {"cu_seq_lens_k": torch.tensor([0, 3, 7])})  # fmt: skip
        self.refuses("position_ids: expected 0, 1, ... in each sequence of cu_seq_lens_q", self.model, packed,
                     **call, position_ids=torch.arange(7)[None])  # fmt: skip

    def test_rows_of_padding_alone(self):
        ids = torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0], [9, 10, 11, 0]])
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]])
        labels = torch.where(mask.bool(), ids, -100)
        logits = self.logits(input_ids=ids, attention_mask=mask)
        self.assertTrue(same_bits(logits[[0, 2]], self.logits(input_ids=IDS, attention_mask=MASK)))
        self.assertEqual(logits[1].abs().max(), 0)
        losses = [self.model(ids[rows], mask[rows], labels=labels[rows]).loss for rows in ([0, 1, 2], [0, 2])]
        self.assertTrue(same_bits(*(loss.detach() for loss in losses)))
        self.refuses(r"input_ids\[1\]: expected at least one token, got only padding",
                     Batch.from_padded, ids, mask)  # fmt: skip
        self.refuses(r"sequences\[1\]: expected at least one token", Batch.of, [[1, 2], []])
        self.refuses(r"input_ids\[0\]: expected at least one token", self.model, ids[1:2], mask[1:2])

    def test_labels_at_padding(self):
        self.refuses(r"labels: expected -100 at padding, .* got 0 at \[1, 3\]", self.model, IDS, MASK,
                     labels=IDS)  # fmt: skip

    # A decoding loop that hands on what it got would decode without what came before.
    def test_no_cache_is_said(self):
        with torch.no_grad():
            out = self.model(IDS, MASK)
        with self.assertRaisesRegex(
            RuntimeError, "past_key_values: .* makes no cache unless .* use_cache=True"
        ):
            self.model(IDS[:, :1], past_key_values=out.past_key_values)
        self.assertEqual(list(out), ["logits"])
        copied = pickle.loads(pickle.dumps(out))
        self.assertTrue(same_bits(copied.logits, out.logits))
        self.assertIsNone(self.model(IDS, MASK, use_cache=False).past_key_values)
        self.assertIsNone(self.model(IDS, MASK, labels=torch.where(MASK.bool(), IDS, -100)).past_key_values)
        self.assertIsNotNone(self.model(IDS, MASK, use_cache=True).past_key_values)
        model = patch(make("Llama"))
        model.config.use_cache = False
        self.assertIsNone(model(IDS, MASK).past_key_values)

    def test_generates_without_a_cache(self):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": MASK.flip(1)}
        found = self.model.generate(IDS.flip(1), use_cache=False, **options)
        self.assertTrue(torch.equal(found, make("Llama").generate(IDS.flip(1), **options)))


if __name__ == "__main__":
    unittest.main()
