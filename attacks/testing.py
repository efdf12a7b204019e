"""A conformance suite for attacks, ours and other people's.

In the tests of a package that adds an attack::

    import pytest
    from attacks.testing import CHECKS, Trial

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check):
        check(Trial(attack=MyAttack(), model="deit_tiny"))

Everything runs on small untrained models (64 x 64 pixels) and bundled pictures, without a network.
A check that fails raises ``ConformanceError``, which says what the attack did wrong.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch

from fedmjp.config import FederationConfig, ModelConfig
from fedmjp.data.batches import batch_of_round
from fedmjp.data.selection import select_for
from fedmjp.degradation import degrade
from fedmjp.errors import AttackNotApplicableError
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import local_update

SEED = 0
UPLOADS = 2
SINGLE_GRADIENT = ThreatModel()


class ConformanceError(AssertionError):
    """The attack breaks the contract in the way that the message says."""


class GradientInversion(Protocol):
    """What the suite needs of an attack; ``attacks.base.Attack`` gives it."""

    name: ClassVar[str]

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Names of the upload's tensors that the attack reads."""

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Which requirement fails."""

    def reconstruct(
        self, uploads: Sequence[Upload], model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> list[Reconstruction]:
        """One reconstruction per upload."""


@dataclass(frozen=True)
class Trial:
    """An attack, and the control on which it has to show that it leaks.

    Attributes:
        attack: Ready to use, with the options that the suite is to run with.
        model: Name of an undefended model that it applies to.
        threat: What it is granted, and how often and how degraded clients upload.
        gain: PSNR in dB by which its mean must beat the grey picture on the undefended model; None for
            an attack that makes no such claim.
        tolerance: Largest difference of a pixel between an upload attacked alone and in a stack.
    """

    attack: GradientInversion
    model: str
    threat: ThreatModel = SINGLE_GRADIENT
    gain: float | None = 3.0
    tolerance: float = 1e-3

    def network(self, *, defence: str = "none") -> VitClassifier:
        """The small model, anew each time."""
        return copy.deepcopy(_network(self.model, defence))

    def batches(self) -> list[PrivateBatch]:
        """What clients hold."""
        return _batches(self.threat.batch_size, 0)

    def uploads(self, model: VitClassifier) -> list[Upload]:
        """What the clients send, with labels and others where the threat model grants them, anew each time."""
        defence = "mjp" if model.defended else "none"
        first, *later = (
            [_replaced(upload, tensors=copy.deepcopy(dict(upload.tensors))) for upload in made]
            for made in (_uploads(self.model, defence, self.threat, n) for n in range(self.threat.uploads_per_picture))
        )
        others = zip(*later, strict=True) if later else [()] * len(first)
        return [_replaced(upload, others=kept) for upload, kept in zip(first, others, strict=True)]

    def run(self, uploads: Sequence[Upload], model: VitClassifier) -> list[Reconstruction]:
        """Attack with a generator of the suite's seed."""
        generator = torch.Generator().manual_seed(SEED)
        return self.attack.reconstruct(uploads, model, self.threat, generator=generator)


_SIZE: Mapping[str, Any] = {"image_size": 64, "patch_size": 8}


@lru_cache(maxsize=8)
def _network(name: str, defence: str) -> VitClassifier:
    return build_vit(ModelConfig.parse({"name": name, "defence": defence, **_SIZE}))


@lru_cache(maxsize=8)
def _batches(size: int, number: int) -> list[PrivateBatch]:
    """Of each client, for one of its uploads."""
    pictures = {"clients": UPLOADS, "pictures_per_client": size, "batch_size": size, "uploads_per_picture": number + 1}
    config = FederationConfig.parse({**pictures, "inputs": (Picture.CLEAN,), **_SIZE})
    selection = select_for(config)
    return [batch_of_round(config, selection, client, config.rounds) for client in range(UPLOADS)]


@lru_cache(maxsize=16)
def _uploads(name: str, defence: str, threat: ThreatModel, number: int) -> list[Upload]:
    model = _network(name, defence)
    return [
        Upload(
            tensors=degrade(
                local_update(model, batch, threat), threat, generator=torch_generator(SEED, "noise", node, number)
            ),
            kind=threat.update,
            num_examples=threat.batch_size,
            server_round=number + 1,
            node=node,
            weights="conformance",
            labels=tuple(sorted(batch.labels.tolist())) if threat.labels_known else None,
        )
        for node, batch in enumerate(_batches(threat.batch_size, number))
    ]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def gives_pictures(trial: Trial) -> None:
    """One reconstruction per upload, of the right shape, finite and in [0, 1], with and without a defence."""
    for defence in ("none", "mjp"):
        model = trial.network(defence=defence)
        if trial.attack.refusal(model, trial.threat):
            _require(defence != "none", f"{trial.attack.name} refuses its own control {trial.model}")
            continue
        made = trial.run(trial.uploads(model), model)
        _require(len(made) == UPLOADS, f"{len(made)} reconstructions for {UPLOADS} uploads")
        expected = (trial.threat.batch_size, 3, model.image_size, model.image_size)
        for each in made:  # a Reconstruction is finite and in [0, 1], or it could not be made
            _require(tuple(each.images.shape) == expected, f"pictures of shape {tuple(each.images.shape)}")


def changes_nothing(trial: Trial) -> None:
    """Uploads, model and torch's global generator are as they were."""
    model = trial.network()
    uploads = trial.uploads(model)
    given = [each for upload in uploads for each in (upload, *upload.others)]
    before = copy.deepcopy([dict(upload.tensors) for upload in given])
    weights, mode, state = copy.deepcopy(model.state_dict()), model.training, torch.random.get_rng_state()
    trial.run(uploads, model)
    for upload, tensors in zip(given, before, strict=True):
        for name, tensor in tensors.items():
            _require(torch.equal(upload.tensors[name], tensor), f"changes the upload's tensor {name}")
    after = model.state_dict()
    _require(weights.keys() == after.keys(), "changes what the model consists of")
    for name, tensor in weights.items():
        _require(torch.equal(after[name], tensor), f"changes the model's {name}")
    _require(model.training == mode, "leaves the model in another mode")
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        _require(not any(hooks), "leaves hooks on the model")
    _require(all(parameter.requires_grad for parameter in model.parameters()), "leaves parameters frozen")
    _require(torch.equal(torch.random.get_rng_state(), state), "draws from torch's global generator")


def is_deterministic(trial: Trial) -> None:
    """The same generator gives the same pictures, bit by bit."""
    model = trial.network()
    uploads = trial.uploads(model)
    for first, second in zip(trial.run(uploads, model), trial.run(uploads, model), strict=True):
        _require(torch.equal(first.images, second.images), "two runs with the same generator differ")


def treats_uploads_independently(trial: Trial) -> None:
    """An upload's pictures do not depend on what else is in the stack, nor on its place there."""
    model = trial.network()
    uploads = trial.uploads(model)
    stacked = trial.run(uploads, model)
    turned = trial.run(uploads[::-1], model)[::-1]
    alone = [trial.run([upload], model)[0] for upload in uploads]
    for case, others in (("alone", alone), ("in another place of the stack", turned)):
        for here, there in zip(stacked, others, strict=True):
            difference = float((here.images - there.images).abs().max())
            _require(difference <= trial.tolerance, f"an upload {case} gives pictures that differ by {difference:.3g}")


def reads_what_it_declares(trial: Trial) -> None:
    """With only the tensors that ``tensors`` names the result is the same; without one it is refused."""
    model = trial.network()
    upload = trial.uploads(model)[0]
    declared = list(trial.attack.tensors(model))
    if not declared:
        return
    reduced = _with_tensors(upload, declared)
    try:
        same = torch.equal(trial.run([upload], model)[0].images, trial.run([reduced], model)[0].images)
    except KeyError as error:
        raise ConformanceError(f"reads the tensor {error}, which it does not declare") from error
    _require(same, "reads tensors that it does not declare")
    _require(names.ORACLE_TOKEN_GRADIENTS not in declared, "reads the gradients of all tokens, which no upload holds")
    if len(declared) > 1:
        _expect_refusal(trial, [_with_tensors(upload, declared[1:])], model, f"an upload without {declared[0]}")


def refuses_what_it_cannot_attack(trial: Trial) -> None:
    """Uploads of another kind or number of pictures, or of other shapes, are refused with a reason."""
    model = trial.network()
    upload = trial.uploads(model)[0]
    other = "delta" if upload.kind == "gradient" else "gradient"
    count = upload.num_examples + 1
    _expect_refusal(trial, [_replaced(upload, kind=other)], model, f"a {other}, which its threat model excludes")
    _expect_refusal(trial, [_replaced(upload, num_examples=count)], model, f"an upload of {count} pictures")
    declared = list(trial.attack.tensors(model))
    if declared:
        cut = {**upload.tensors, declared[0]: upload.tensors[declared[0]][..., :1]}
        _expect_refusal(trial, [_replaced(upload, tensors=cut)], model, f"a cut tensor {declared[0]}")


def leaks_on_its_control(trial: Trial) -> None:
    """On the undefended model it beats the grey picture: an attack that does not proves nothing elsewhere."""
    if trial.gain is None:
        return
    model = trial.network()
    psnr = metric("psnr").function
    made = torch.cat([each.images for each in trial.run(trial.uploads(model), model)])
    private = torch.cat([batch.clean for batch in trial.batches()])
    gained = float((psnr(made, private) - psnr(torch.full_like(private, 0.45), private)).mean())
    _require(
        gained >= trial.gain,
        f"{trial.attack.name} beats the grey picture by {gained:.1f} dB on {trial.model}, not by {trial.gain:.1f} dB",
    )


CHECKS: tuple[Callable[[Trial], None], ...] = (
    gives_pictures,
    changes_nothing,
    is_deterministic,
    treats_uploads_independently,
    reads_what_it_declares,
    refuses_what_it_cannot_attack,
    leaks_on_its_control,
)


def _with_tensors(upload: Upload, kept: Sequence[str]) -> Upload:
    others = tuple(_with_tensors(other, kept) for other in upload.others)
    return _replaced(upload, tensors={name: upload.tensors[name] for name in kept}, others=others)


def _replaced(upload: Upload, **fields: Any) -> Upload:
    values = {name: getattr(upload, name) for name in upload.__dataclass_fields__}
    return Upload(**(values | fields))


def _expect_refusal(trial: Trial, uploads: Sequence[Upload], model: VitClassifier, what: str) -> None:
    try:
        trial.run(uploads, model)
    except AttackNotApplicableError as error:
        _require(bool(str(error).strip()), f"refuses {what} without saying why")
        return
    raise ConformanceError(f"accepts {what}")
