"""A PyTorch trainer's weights for the services: whole tensors one at a time, or where they are on GPUs; and
the digest of weights from their shards.

    for client in (rollout, scorer):
        update_weights(model, client, weight_version=step)  # on every rank

It needs torch, but not the operators of isobit.torch: it can send the weights of any trainer.
"""

from isobit.torch_weights.digest import model_digest
from isobit.torch_weights.held import held_weights
from isobit.torch_weights.parameters import named_weights
from isobit.torch_weights.senders import WeightsUpdateGroup, init_weights_update_group
from isobit.torch_weights.update import update_weights

__all__ = [
    "WeightsUpdateGroup",
    "held_weights",
    "init_weights_update_group",
    "model_digest",
    "named_weights",
    "update_weights",
]
