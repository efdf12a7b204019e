"""Gradient-inversion attacks: one file per method, one contract (``attacks.base``)."""

from attacks.base import Attack
from fedmjp.registry import Registry

ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    {
        "april": "attacks.april:April",
        "grey": "attacks.grey:Grey",
        "patch_embedding": "attacks.patch_embedding:PatchEmbedding",
    },
)
