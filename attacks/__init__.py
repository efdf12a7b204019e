"""Gradient-inversion attacks: one file per method, one contract (``fedmjp.attacks.base``).

Every class in this folder that states a ``name`` is an attack of that name. Another package adds attacks through the
entry-point group ``fedmjp.attacks``: the name, and ``module:class`` of a subclass of ``fedmjp.attacks.base.Attack``.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedmjp.registry import Registry, named_classes

if TYPE_CHECKING:
    from fedmjp.attacks.base import Attack
    from fedmjp.models.classifier import VitClassifier
    from fedmjp.records import Disclosure

ATTACKS: "Registry[type[Attack[VitClassifier, Disclosure]]]" = Registry(
    "attack", partial(named_classes, __name__, Path(__file__).parent), entry_points="fedmjp.attacks"
)
