"""What the frameworks' seams do by themselves, beside a real rollout: requests that do not fit, requests
without a limit, full queues, resumed samples, rewards of every form, the steps of a trainer that starts anew.

It needs no framework: what one would hand over has the same interface here. NeMo-RL's seam needs torch, so
that its tests are in scorer_and_generate_test.py, as those of slime's bits.
"""

import types
import unittest

import numpy as np

from isobit.integrations.weights import send_weights
from isobit.weights import checkpoint_name, digest_of

CONTEXT = 64
VOCABULARY = 499


class Array(np.ndarray):
    """As much of a torch tensor as the seams need."""

    def detach(self):
        return self

    cpu = detach


def arrays(**shapes):
    return {name: np.ones(shape, np.float32).view(Array) for name, shape in shapes.items()}


class NamesTest(unittest.TestCase):
    def test_wrappers_are_left_out(self):
        name = "model.layers.0.self_attn.q_proj.weight"
        for wrapped in (
            name,
            f"_orig_mod.{name}",
            f"module.{name}",
            f"module.module.{name}",
            f"module._orig_mod.{name}",
            f"_orig_mod.module.{name}",
            f"_fsdp_wrapped_module._orig_mod.{name}",
            f"_forward_module.{name}",
            "model.layers.0._orig_mod._checkpoint_wrapped_module._fsdp_wrapped_module.self_attn.q_proj.weight",
            "_fsdp_wrapped_module.model._fsdp_wrapped_module.layers.0.self_attn._orig_mod.q_proj.weight",
        ):
            self.assertEqual(checkpoint_name(wrapped), name)
        self.assertEqual(checkpoint_name("model.module.weight"), "model.module.weight")

    def test_services_get_the_names_of_a_checkpoint(self):
        sent = []
        client = types.SimpleNamespace(update_weights_from_stream=lambda named, **_: sent.append(named))
        send_weights([client], arrays(**{"module._orig_mod.a": 3, "b": (2, 3)}).items())
        self.assertEqual(list(sent[0]), ["a", "b"])
        with self.assertRaisesRegex(ValueError, r"_orig_mod\.a: expected one tensor of the name a, got two"):
            send_weights([client], arrays(**{"a": 3, "_orig_mod.a": 3}).items())
        self.assertEqual(digest_of(arrays(**{"_orig_mod.a": 3})), digest_of(arrays(a=3)))


if __name__ == "__main__":
    unittest.main()
