"""What tests of all attacks share: on which small model each applies, and options that make it quick."""

from attacks import ATTACKS
from fedmjp.models.classifier import VitClassifier
from fedmjp.threat import ThreatModel

QUICK: dict[str, dict[str, object]] = {
    "gradient_matching": {"iterations": 2},
    "mjp_matching": {"iterations": 2},
    **{name: {"iterations": 1} for name in ATTACKS if name.startswith("breaching_") and name != "breaching_april"},
}


def model_of(name: str) -> str:
    """The small model that an attack is tried on."""
    return "deit_tiny_april" if "april" in name else "deit_tiny"


def applies(name: str, model: VitClassifier) -> bool:
    """Whether a server can run the attack on the model."""
    attack = ATTACKS.get(name)
    return attack.role != "bound" and attack().refusal(model, ThreatModel()) is None
