"""What tests of all attacks share: on which small model each applies, and options that make it quick."""

from dataclasses import replace

from fedmjp.attacks import ATTACKS
from fedmjp.defences.base import Client
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.roles import roles_of
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

QUICK: dict[str, dict[str, object]] = {
    "body_newton": {"starts": 1, "steps": 1},
    "gauss_newton": {"starts": 1, "steps": 1},
    "feature_inversion": {"iterations": 1, "restarts": 1},
    **{name: {"rounds": 1, "starts": 16, "steps": 0} for name in ATTACKS if name.startswith("first_mlp")},
    "gradient_matching": {"iterations": 2},
    "gradvit": {"iterations": 2},
    "mjp_matching": {"iterations": 2},
    "network_degraded": {"steps": 1, "starts": 1},
    "patch_embedding_degraded": {"rounds": 16},
    **{name: {"iterations": 1} for name in ATTACKS if name.startswith("breaching_") and name != "breaching_april"},
}

THREATS = {  # attacks that read what a server plants
    "token_imprint": ThreatModel(server="token_imprint"),
    **{
        f"concentrated_{content}": ThreatModel(server=f"concentrator:tells={content}")
        for content in ("label", "thumbnail")
    },
}


def model_of(name: str) -> str:
    """The small model that an attack is tried on."""
    return "deit_tiny_april" if "april" in name else "deit_tiny"


def applies(name: str, model: VitClassifier) -> bool:
    """Whether a server can run the attack on the model."""
    attack = ATTACKS.get(name)
    return attack.role != "bound" and attack().refusal(model, ThreatModel()) is None


def protected(upload: Upload, model: VitClassifier, threat: ThreatModel, *, seed: int = 0) -> Upload:
    """The upload as it leaves a client that does what the threat model says."""
    client = Client(upload.kind, roles_of(model), upload.num_examples)
    tensors = threat.pipeline.protect(upload.tensors, client, randomness=SeededRandomness(seed))
    return replace(upload, tensors=tensors)
