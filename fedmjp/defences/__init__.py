"""Defences: one file per kind, one contract (``fedmjp.defences.base``).

Other packages add theirs through the entry-point group ``fedmjp.defences``: the name, and ``module:class``.
"""

from fedmjp.defences.base import Defence
from fedmjp.registry import Registry

DEFENCES: Registry[type[Defence]] = Registry(
    "defence",
    {
        "clip": "fedmjp.defences.clipping:Clip",
        "dp_sgd": "fedmjp.defences.privacy:DpSgd",
        "gaussian": "fedmjp.defences.noise:Gaussian",
        "jigsaw": "fedmjp.defences.jigsaw:Jigsaw",
        "laplace": "fedmjp.defences.noise:Laplace",
        "local_dp": "fedmjp.defences.privacy:LocalDp",
        "mjp": "fedmjp.defences.jigsaw:Mjp",
        "pixels": "fedmjp.defences.jigsaw:Pixels",
        "prune": "fedmjp.defences.compression:Prune",
        "quantise": "fedmjp.defences.compression:Quantise",
        "round": "fedmjp.defences.compression:Round",
        "secure_sum": "fedmjp.defences.secure_sum:SecureSum",
        "sign": "fedmjp.defences.compression:Sign",
        "soteria": "fedmjp.defences.soteria:Soteria",
        "withhold": "fedmjp.defences.withhold:Withhold",
    },
    entry_points="fedmjp.defences",
)
