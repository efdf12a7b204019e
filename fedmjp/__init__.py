"""A federated-learning privacy benchmark: who computes what, what leaks from it, and what protects.

The names below are loaded when they are first used: ``import fedmjp`` itself takes no time.

- ``Scenario``: who computes what from which pictures, and what leaves; ``scenario.exchange(pictures)`` makes an upload.
- ``TrainingScenario``: the same where clients train together.
- ``attack(name, upload, scenario)``: what a server makes of it. ``score(result, private, setting=...)``: how near.
- ``adopt(module)``: the same for a model of your own. ``recover(...)``: two gradients in, a picture out.
- ``bundled_pictures(count)``; ``ATTACKS``, ``DEFENCES``, ``SERVERS``, ``MODELS``, ``METRICS``: what there is, by name.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmjp.attacks import ATTACKS
    from fedmjp.attacks.recover import recover
    from fedmjp.defences import DEFENCES
    from fedmjp.facade import attack, bundled_pictures, score
    from fedmjp.metrics import METRICS
    from fedmjp.models.adopt import adopt
    from fedmjp.models.architectures import ARCHITECTURES as MODELS
    from fedmjp.scenario import Scenario, TrainingScenario
    from fedmjp.threat import SERVERS

if not Path(__file__).with_name("attacks").is_dir():
    # Flower's bundle skips links: attacks, clients and server lie beside this package there.
    __path__.append(str(Path(__file__).parents[1]))

__version__ = "0.1.0"
__all__ = [
    "ATTACKS",
    "DEFENCES",
    "METRICS",
    "MODELS",
    "SERVERS",
    "Scenario",
    "TrainingScenario",
    "adopt",
    "attack",
    "bundled_pictures",
    "recover",
    "score",
]

_HOMES = {
    "ATTACKS": "fedmjp.attacks:ATTACKS",
    "DEFENCES": "fedmjp.defences:DEFENCES",
    "METRICS": "fedmjp.metrics:METRICS",
    "MODELS": "fedmjp.models.architectures:ARCHITECTURES",
    "SERVERS": "fedmjp.threat:SERVERS",
    "Scenario": "fedmjp.scenario:Scenario",
    "TrainingScenario": "fedmjp.scenario:TrainingScenario",
    "adopt": "fedmjp.models.adopt:adopt",
    "attack": "fedmjp.facade:attack",
    "bundled_pictures": "fedmjp.facade:bundled_pictures",
    "recover": "fedmjp.attacks.recover:recover",
    "score": "fedmjp.facade:score",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmjp' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
