"""Gradient-inversion attacks: one file per method, one contract (``attacks.base``).

A package of its own adds attacks through the entry-point group ``fedmjp.attacks``: the name, and
``module:class`` of a subclass of ``attacks.base.Attack``.
"""

from attacks.base import Attack
from fedmjp.registry import Registry

ATTACKS: Registry[type[Attack]] = Registry(
    "attack",
    {
        "april": "attacks.april:April",
        "april_min_norm": "attacks.april:AprilMinNorm",
        "grey": "attacks.grey:Grey",
        "oracle_april": "attacks.april:OracleApril",
        "oracle_patch_embedding": "attacks.patch_embedding:OraclePatchEmbedding",
        "patch_embedding": "attacks.patch_embedding:PatchEmbedding",
        "patch_embedding_wiener": "attacks.patch_embedding:PatchEmbeddingWiener",
    },
    entry_points="fedmjp.attacks",
)
