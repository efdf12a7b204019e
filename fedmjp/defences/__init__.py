"""Defences: one file each, one contract (``fedmjp.defences.base``).

Other packages add theirs through the entry-point group ``fedmjp.defences``: the name, and ``module:class``.
"""

from typing import TYPE_CHECKING

from fedmjp.registry import Registry

if TYPE_CHECKING:
    from fedmjp.defences.base import Defence

DEFENCES: "Registry[type[Defence]]" = Registry(
    "defence",
    {
        "clip": "fedmjp.defences.clip:Clip",
        "dp_sgd": "fedmjp.defences.dp_sgd:DpSgd",
        "gaussian": "fedmjp.defences.gaussian:Gaussian",
        "jigsaw": "fedmjp.defences.jigsaw:Jigsaw",
        "laplace": "fedmjp.defences.laplace:Laplace",
        "local_dp": "fedmjp.defences.local_dp:LocalDp",
        "mjp": "fedmjp.defences.mjp:Mjp",
        "pixels": "fedmjp.defences.pixels:Pixels",
        "prune": "fedmjp.defences.prune:Prune",
        "quantise": "fedmjp.defences.quantise:Quantise",
        "round": "fedmjp.defences.round:Round",
        "secure_sum": "fedmjp.defences.secure_sum:SecureSum",
        "sign": "fedmjp.defences.sign:Sign",
        "soteria": "fedmjp.defences.soteria:Soteria",
        "withhold": "fedmjp.defences.withhold:Withhold",
    },
    entry_points="fedmjp.defences",
)
