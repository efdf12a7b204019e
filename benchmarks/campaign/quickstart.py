"""The experiment that a newcomer runs first: small, real, no download."""

from typing import Literal

from benchmarks.plan.experiment import Experiment
from fedmjp.config import FederationConfig
from fedmjp.settings import Picture

CLIENTS = 2
PICTURES_PER_CLIENT = 4
MASK_RATIO = 0.27


def quickstart(*, device: Literal["cpu", "cuda"]) -> Experiment:
    """DeiT-S with and without MJP, two clients, eight bundled pictures, three settings.

    ``april`` runs on the architecture it needs, ``patch_embedding`` on the unmodified model, and
    ``grey`` beside both as the floor.
    """
    return Experiment(
        federation=FederationConfig(
            device=device,
            models=("deit_small", "deit_small_april"),
            defences=("none", "mjp"),
            mask_ratio=MASK_RATIO,
            data="bundled",
            clients=CLIENTS,
            pictures_per_client=PICTURES_PER_CLIENT,
            inputs=tuple(Picture),
        ),
        attacks={"deit_small": ("patch_embedding", "grey"), "deit_small_april": ("april", "grey")},
    )
