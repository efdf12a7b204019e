"""The experiments that a newcomer runs first: small, real, no download."""

from typing import Literal

from benchmarks.plan.experiment import AttackConfig, Experiment, experiments_of
from fedmjp.scenario import Scenario
from fedmjp.settings import Setting

CLIENTS = 2
PICTURES_PER_CLIENT = 4
MASK_RATIO = 0.27
# ``april`` runs on the architecture that it needs, ``patch_embedding`` on the unmodified model.
ATTACKS = {"deit_small": "patch_embedding", "deit_small_april": "april"}


def quickstart(*, device: Literal["cpu", "cuda"]) -> list[Experiment]:
    """DeiT-S with and without MJP, two clients, eight bundled pictures, three settings; ``grey`` is the floor."""
    found: list[Experiment] = []
    for model, attack in ATTACKS.items():
        for defences in ((), ("mjp",)):
            scenario = Scenario.parse(
                {
                    "model": model,
                    "defences": defences,
                    "clients": CLIENTS,
                    "pictures_per_client": PICTURES_PER_CLIENT,
                    "device": device,
                }
            )
            attacks = (AttackConfig(name=attack), AttackConfig(name="grey"))
            found += experiments_of(scenario, tuple(Setting), attacks, mask_ratio=MASK_RATIO)
    return found
