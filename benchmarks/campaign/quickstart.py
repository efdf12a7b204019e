"""The experiments that a newcomer runs first: small, real, no download."""

from typing import Literal

from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment, experiments_of
from fedmjp.scenario import Scenario
from fedmjp.settings import Setting

CLIENTS = 2
PICTURES_PER_CLIENT = 4
MASK_RATIO = 0.27
# What a server tries, by model and by the uploads of each picture that it holds. ``april`` runs on the architecture
# that it needs, the others on the unmodified model.
TRIED = {
    ("deit_small", 1): ("patch_embedding", "mjp_prior"),
    ("deit_small", 2): ("mjp_intersection",),
    ("deit_small", 4): ("mjp_intersection",),
    ("deit_small", 8): ("mjp_intersection",),
    ("deit_small_april", 1): ("april",),
}


def quickstart(*, device: Literal["cpu", "cuda"]) -> list[Experiment]:
    """Build the experiments of a newcomer: DeiT-S with and without MJP, two clients with eight bundled pictures.

    Args:
        device: Where attacks run.
    """
    experiments: list[Experiment] = []
    for (model, uploads), attacks in TRIED.items():
        scenario = Scenario.parse(
            {
                "model": model,
                "defences": ("mjp",),
                "clients": CLIENTS,
                "pictures_per_client": PICTURES_PER_CLIENT,
                "uploads_per_picture": uploads,
                "device": device,
            }
        )
        configs = tuple(AttackConfig(name=name) for name in (*attacks, "grey"))
        experiments += experiments_of(scenario, (Setting.C,), configs, mask_ratio=MASK_RATIO)
    return experiments
