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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from attacks import ATTACKS
from attacks.base import Attack
from fedmjp.config import UpdateKind
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackFailedError, AttackNotApplicableError
from fedmjp.exchange import Exchange
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.roles import roles_of
from fedmjp.records import Reconstruction, Upload
from fedmjp.scenario import Scenario
from fedmjp.threat import ThreatModel

SEED = 0
UPLOADS = 2
SINGLE_GRADIENT = ThreatModel()
SUMMED = 2  # clients
# What is done to uploads besides, to see whether an attack that counts as adapted is up to it.
DEGRADED = (
    "gaussian:noise=0.01",
    "gaussian:noise=0.3",
    "prune:kept=0.1",
    "round:precision=bfloat16",
    "quantise:bits=8",
)
YARDSTICKS = ("mjp_prior", "patch_embedding_wiener")  # attacks whose marks were measured
WITHIN = 3.0  # dB of PSNR by which an adapted attack may stay behind the better of these


class ConformanceError(AssertionError):
    """The attack breaks the contract in the way that the message says."""


@dataclass(frozen=True)
class Trial:
    """An attack with the options to test it with, and the control on which it has to show that it leaks.

    Attributes:
        model: Name of an undefended model that it applies to.
        threat: What it is granted, how often clients upload, and what they do to updates.
        gain: PSNR in dB by which it must beat the grey picture on that model; None for an attack without this claim.
        tolerance: Largest difference of a pixel between an upload attacked alone and in a stack.
    """

    attack: Attack
    model: str
    threat: ThreatModel = SINGLE_GRADIENT
    gain: float | None = 3.0
    tolerance: float = 1e-3

    def scenario(self, *defences: str, besides: Sequence[str] = ()) -> Scenario:
        """What clients do: the defences of the threat model, others before them, and others ``besides``, after."""
        shared = set(ThreatModel.model_fields) & set(Scenario.model_fields) - {"defences"}
        clients = self.threat.clients * (SUMMED if any("secure_sum" in defence for defence in besides) else 1)
        values = {
            **self.threat.model_dump(include=shared),
            "model": {"name": self.model, "image_size": 64, "patch_size": 8},
            "defences": (*defences, *self.threat.defences, *besides),
            "clients": UPLOADS * clients,
            "pictures_per_client": self.threat.batch_size,
        }
        return Scenario.parse(values)

    def uploads(self, model: VitClassifier) -> list[Upload]:
        """What the clients send, with labels and others where the threat model grants them, anew each time."""
        return [_anew(exchange.upload) for exchange in _exchanges(self.scenario(*(["mjp"] if model.defended else [])))]

    def control(self, *defences: str) -> tuple[VitClassifier, list[Upload]]:
        """The small model and what the clients send, anew each time."""
        model = copy.deepcopy(_network(self.scenario(*defences).network))
        return model, self.uploads(model)

    def run(self, uploads: Sequence[Upload], model: VitClassifier) -> list[Reconstruction]:
        """Attack with a generator of the suite's seed."""
        generator = torch.Generator().manual_seed(SEED)
        return self.attack.reconstruct(uploads, model, self.threat, generator=generator)


_network = lru_cache(maxsize=8)(build_vit)


@lru_cache(maxsize=16)
def _exchanges(scenario: Scenario) -> list[Exchange]:
    """Of each client, or each group of clients whose updates are summed."""
    selection, model = select_for(scenario), _network(scenario.network)
    batches = selection.batches(scenario)
    return [scenario.exchange([selection.load(entry) for entry in batch], model=model) for batch in batches]


def _anew(upload: Upload, kept: Sequence[str] | None = None) -> Upload:
    """With tensors of its own: all, or some."""
    tensors = {name: upload.tensors[name].clone() for name in (upload.tensors if kept is None else kept)}
    return replace(upload, tensors=tensors, others=tuple(_anew(other, kept) for other in upload.others))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def gives_pictures(trial: Trial) -> None:
    """One reconstruction per upload, of the right shape, finite and in [0, 1], with and without a defence."""
    for defences in ((), ("mjp",)):
        model, uploads = trial.control(*defences)
        if trial.attack.refusal(model, trial.threat):
            _require(bool(defences), f"{trial.attack.name} refuses its own control {trial.model}")
            continue
        made = trial.run(uploads, model)
        _require(len(made) == UPLOADS, f"{len(made)} reconstructions for {UPLOADS} uploads")
        expected = (trial.threat.batch_size, 3, model.image_size, model.image_size)
        for result in made:  # a Reconstruction is finite and in [0, 1], or it could not be made
            _require(tuple(result.images.shape) == expected, f"pictures of shape {tuple(result.images.shape)}")


def changes_nothing(trial: Trial) -> None:
    """Uploads, model and torch's global generator are as they were."""
    model, uploads = trial.control()
    given = [source for upload in uploads for source in (upload, *upload.others)]
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
    model, uploads = trial.control()
    for first, second in zip(trial.run(uploads, model), trial.run(uploads, model), strict=True):
        _require(torch.equal(first.images, second.images), "two runs with the same generator differ")


def treats_uploads_independently(trial: Trial) -> None:
    """An upload's pictures do not depend on what else is in the stack, nor on its place there."""
    model, uploads = trial.control()
    stacked = trial.run(uploads, model)
    turned = trial.run(uploads[::-1], model)[::-1]
    alone = [trial.run([upload], model)[0] for upload in uploads]
    for case, others in (("alone", alone), ("in another place of the stack", turned)):
        for here, there in zip(stacked, others, strict=True):
            difference = float((here.images - there.images).abs().max())
            _require(difference <= trial.tolerance, f"an upload {case} gives pictures that differ by {difference:.3g}")


def reads_what_it_declares(trial: Trial) -> None:
    """With only the tensors that ``tensors`` names the result is the same; without one it is refused."""
    model, (upload, *_) = trial.control()
    declared = list(trial.attack.tensors(model))
    if not declared:
        return
    try:
        whole, reduced = (trial.run([version], model)[0].images for version in (upload, _anew(upload, declared)))
    except KeyError as error:
        raise ConformanceError(f"reads the tensor {error}, which it does not declare") from error
    _require(torch.equal(whole, reduced), "reads tensors that it does not declare")
    if len(declared) > 1:
        _expect_refusal(trial, _anew(upload, declared[1:]), model, f"an upload without {declared[0]}")


def refuses_what_it_cannot_attack(trial: Trial) -> None:
    """Uploads of another kind or number of pictures, or of other shapes, are refused with a reason."""
    model, (upload, *_) = trial.control()
    other: UpdateKind = "delta" if upload.kind == "gradient" else "gradient"
    count = upload.num_examples + 1
    _expect_refusal(trial, replace(upload, kind=other), model, f"a {other}, which its threat model excludes")
    _expect_refusal(trial, replace(upload, num_examples=count), model, f"an upload of {count} pictures")
    declared = list(trial.attack.tensors(model))
    if declared:
        cut = {**upload.tensors, declared[0]: upload.tensors[declared[0]][..., :1]}
        _expect_refusal(trial, replace(upload, tensors=cut), model, f"a cut tensor {declared[0]}")


def refuses_sums_and_what_is_withheld(trial: Trial) -> None:
    """A sum over clients is refused by all that do not take sums; withheld tensors by all that read them, by name."""
    model, _ = trial.control()
    if trial.threat.clients == 1:
        summed = trial.scenario(besides=(f"secure_sum:clients={SUMMED}",))
        refusal = trial.attack.refusal(model, summed.threat)
        _require(bool(refusal) is not trial.attack.takes_sums, f"with a sum over clients its refusal is {refusal!r}")
        if trial.attack.takes_sums:
            _, made = _attacked(trial.attack, summed, UPLOADS)
            _require(made is not None and len(made) == UPLOADS * summed.threat.pictures, "gives no pictures of a sum")
    declared = set(trial.attack.tensors(model))
    for role in roles_of(model):
        withheld = trial.scenario(besides=(f"withhold:roles={role}",)).threat
        missing = declared & withheld.pipeline.withheld(roles_of(model))
        refusal = trial.attack.refusal(model, withheld) or ""
        named = bool(refusal) and all(name in refusal for name in missing)
        _require(named if missing else not refusal, f"without {role} its refusal is {refusal!r}")


def adapts_to_what_it_claims(trial: Trial) -> None:
    """Where it counts as adapted to an upload that was degraded, it is about as good as attacks that were measured.

    Where these attacks, or it, refuse or fail, nothing is compared: a failure that is told proves nothing.
    """
    if trial.threat.defences or trial.threat.batch_size > 1:
        return
    for before, degraded in product(((), ("mjp",)), DEGRADED):
        scenario = trial.scenario(*before, besides=(degraded,))
        if not trial.attack.adapted(scenario.pipeline, _network(scenario.network), scenario.threat):
            continue
        mine, _ = _attacked(trial.attack, scenario, 1)
        others = [_attacked(ATTACKS.get(name)(), scenario, 1)[0] for name in YARDSTICKS]
        best = max((value for value in others if value is not None), default=None)
        if mine is None or best is None:
            continue
        text = f"is adapted to {scenario.pipeline.label}, and gives {mine:.1f} dB where {best:.1f} dB are possible"
        _require(mine >= best - WITHIN, text)


def _attacked(attack: Attack, scenario: Scenario, count: int) -> tuple[float | None, Tensor | None]:
    """Mean PSNR in dB of so many uploads, and the pictures; None if the attack refuses or fails."""
    made, model = _exchanges(scenario)[:count], _network(scenario.network)
    uploads, generator = [_anew(exchange.upload) for exchange in made], torch.Generator().manual_seed(SEED)
    try:
        results = attack.reconstruct(uploads, copy.deepcopy(model), scenario.threat, generator=generator)
    except (AttackFailedError, AttackNotApplicableError):
        return None, None
    images, private = (
        torch.cat([result.images for result in results]),
        torch.cat([exchange.private.clean for exchange in made]),
    )
    return float(metric("psnr").function(images, private).mean()), images


def leaks_on_its_control(trial: Trial) -> None:
    """On the undefended model it beats the grey picture: an attack that does not proves nothing elsewhere."""
    if trial.gain is None:
        return
    model, uploads = trial.control()
    psnr = metric("psnr").function
    made = torch.cat([result.images for result in trial.run(uploads, model)])
    private = torch.cat([exchange.private.clean for exchange in _exchanges(trial.scenario())])
    gained = float((psnr(made, private) - psnr(torch.full_like(private, 0.45), private)).mean())
    text = f"{trial.attack.name} beats the grey picture by {gained:.1f} dB on {trial.model}, not by {trial.gain:.1f} dB"
    _require(gained >= trial.gain, text)


CHECKS: tuple[Callable[[Trial], None], ...] = (
    gives_pictures,
    changes_nothing,
    is_deterministic,
    treats_uploads_independently,
    reads_what_it_declares,
    refuses_what_it_cannot_attack,
    refuses_sums_and_what_is_withheld,
    adapts_to_what_it_claims,
    leaks_on_its_control,
)


def _expect_refusal(trial: Trial, upload: Upload, model: VitClassifier, what: str) -> None:
    try:
        trial.run([upload], model)
    except AttackNotApplicableError as error:
        _require(bool(str(error).strip()), f"refuses {what} without saying why")
        return
    raise ConformanceError(f"accepts {what}")
