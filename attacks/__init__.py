"""Gradient-inversion attacks: one file per method, one contract (``fedmjp.attacks.base``).

A package of its own adds attacks through the entry-point group ``fedmjp.attacks``: the name, and
``module:class`` of a subclass of ``fedmjp.attacks.base.Attack``.
"""

from typing import TYPE_CHECKING

from fedmjp.registry import Registry

if TYPE_CHECKING:
    from fedmjp.attacks.base import Attack
    from fedmjp.models.classifier import VitClassifier
    from fedmjp.records import Disclosure

ATTACKS: "Registry[type[Attack[VitClassifier, Disclosure]]]" = Registry(
    "attack",
    {
        "april": "fedmjp.attacks.april:April",
        "april_min_norm": "fedmjp.attacks.april:AprilMinNorm",
        "body_newton": "fedmjp.attacks.gauss_newton.body:BodyNewton",
        "breaching_april": "fedmjp.attacks.breaching_adapter:AprilAnalytic",
        "breaching_beyondinfering": "fedmjp.attacks.breaching_adapter:BeyondInfering",
        "breaching_clsattack": "fedmjp.attacks.breaching_adapter:ClsAttack",
        "breaching_deepleakage": "fedmjp.attacks.breaching_adapter:DeepLeakage",
        "breaching_invertinggradients": "fedmjp.attacks.breaching_adapter:InvertingGradients",
        "breaching_legacy": "fedmjp.attacks.breaching_adapter:Legacy",
        "breaching_modern": "fedmjp.attacks.breaching_adapter:Modern",
        "breaching_seethroughgradients": "fedmjp.attacks.breaching_adapter:SeeThroughGradients",
        "breaching_tag": "fedmjp.attacks.breaching_adapter:Tag",
        "breaching_wei": "fedmjp.attacks.breaching_adapter:Wei",
        "chance": "fedmjp.attacks.chance:Chance",
        "class_token": "fedmjp.attacks.class_token.attack:ClassToken",
        "first_mlp": "fedmjp.attacks.first_block.first_mlp:FirstMlp",
        "first_mlp_patches": "fedmjp.attacks.first_block.first_mlp:FirstMlpPatches",
        "first_mlp_positions": "fedmjp.attacks.first_block.first_mlp:FirstMlpPositions",
        "gauss_newton": "fedmjp.attacks.gauss_newton.attack:GaussNewton",
        "gradient_matching": "fedmjp.attacks.gradient_matching:GradientMatching",
        "gradvit": "fedmjp.attacks.gradvit:GradVit",
        "grey": "fedmjp.attacks.grey:Grey",
        "labels": "fedmjp.attacks.labels:Labels",
        "mjp_intersection": "fedmjp.attacks.mjp.intersection:MjpIntersection",
        "mjp_matching": "fedmjp.attacks.mjp.matching:MjpMatching",
        "mjp_prior": "fedmjp.attacks.mjp.prior:MjpPrior",
        "mjp_span": "fedmjp.attacks.mjp.span.attack:MjpSpan",
        "network_degraded": "fedmjp.attacks.gauss_newton.degraded:NetworkDegraded",
        "oracle_april": "fedmjp.attacks.april:OracleApril",
        "oracle_patch_embedding": "fedmjp.attacks.patch_embedding:OraclePatchEmbedding",
        "patch_embedding": "fedmjp.attacks.patch_embedding:PatchEmbedding",
        "patch_embedding_degraded": "fedmjp.attacks.patch_embedding_degraded:PatchEmbeddingDegraded",
        "patch_embedding_wiener": "fedmjp.attacks.patch_embedding:PatchEmbeddingWiener",
        "token_imprint": "fedmjp.attacks.token_imprint:TokenImprint",
    },
    entry_points="fedmjp.attacks",
)
