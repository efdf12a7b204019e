"""Gradient-inversion attacks: one file per method, one contract (``attacks.base``).

A package of its own adds attacks through the entry-point group ``fedmjp.attacks``: the name, and
``module:class`` of a subclass of ``attacks.base.Attack``.
"""

from typing import TYPE_CHECKING

from fedmjp.registry import Registry

if TYPE_CHECKING:
    from attacks.base import Attack
    from fedmjp.models.classifier import VitClassifier
    from fedmjp.records import Disclosure

ATTACKS: "Registry[type[Attack[VitClassifier, Disclosure]]]" = Registry(
    "attack",
    {
        "april": "attacks.april:April",
        "april_min_norm": "attacks.april:AprilMinNorm",
        "body_newton": "attacks.gauss_newton.body:BodyNewton",
        "breaching_april": "attacks.breaching_adapter:AprilAnalytic",
        "breaching_beyondinfering": "attacks.breaching_adapter:BeyondInfering",
        "breaching_clsattack": "attacks.breaching_adapter:ClsAttack",
        "breaching_deepleakage": "attacks.breaching_adapter:DeepLeakage",
        "breaching_invertinggradients": "attacks.breaching_adapter:InvertingGradients",
        "breaching_legacy": "attacks.breaching_adapter:Legacy",
        "breaching_modern": "attacks.breaching_adapter:Modern",
        "breaching_seethroughgradients": "attacks.breaching_adapter:SeeThroughGradients",
        "breaching_tag": "attacks.breaching_adapter:Tag",
        "breaching_wei": "attacks.breaching_adapter:Wei",
        "chance": "attacks.chance:Chance",
        "class_token": "attacks.class_token.attack:ClassToken",
        "first_mlp": "attacks.first_mlp.attack:FirstMlp",
        "first_mlp_patches": "attacks.first_mlp.attack:FirstMlpPatches",
        "first_mlp_positions": "attacks.first_mlp.attack:FirstMlpPositions",
        "gauss_newton": "attacks.gauss_newton.attack:GaussNewton",
        "gradient_matching": "attacks.gradient_matching:GradientMatching",
        "gradvit": "attacks.gradvit:GradVit",
        "grey": "attacks.grey:Grey",
        "labels": "attacks.labels:Labels",
        "mjp_intersection": "attacks.mjp.intersection:MjpIntersection",
        "mjp_matching": "attacks.mjp.matching:MjpMatching",
        "mjp_prior": "attacks.mjp.prior:MjpPrior",
        "mjp_span": "attacks.mjp.span.attack:MjpSpan",
        "network_degraded": "attacks.gauss_newton.degraded:NetworkDegraded",
        "oracle_april": "attacks.april:OracleApril",
        "oracle_patch_embedding": "attacks.patch_embedding:OraclePatchEmbedding",
        "patch_embedding": "attacks.patch_embedding:PatchEmbedding",
        "patch_embedding_degraded": "attacks.patch_embedding_degraded:PatchEmbeddingDegraded",
        "patch_embedding_wiener": "attacks.patch_embedding:PatchEmbeddingWiener",
        "token_imprint": "attacks.token_imprint:TokenImprint",
    },
    entry_points="fedmjp.attacks",
)
