"""A conformance suite for attacks, ours and other people's.

In the tests of a package that adds an attack::

    import pytest
    from fedmjp.attacks.testing import CHECKS, AttackTrial

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check):
        check(AttackTrial(attack=MyAttack(), model="deit_tiny"))

Everything runs on small untrained models (64 x 64 pixels) and bundled pictures, without a network.
A check that fails raises ``AttackConformanceError``, which says what the attack did wrong.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Attack
from fedmjp.config import ModelConfig, UpdateKind
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackFailedError, AttackNotApplicableError
from fedmjp.exchange import Exchange
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit, with_weights
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.roles import roles_of
from fedmjp.records import Disclosure, Reconstruction, Upload
from fedmjp.scenario import Scenario
from fedmjp.threat import ThreatModel

STATED = ("name", "paper", "summary", "requires", "exploits")
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
LABELS = 0.75  # share of labels that an attack which reveals them has to tell right
WITHIN = 3.0  # dB of PSNR by which an adapted attack may stay behind the better of these


class AttackConformanceError(AssertionError):
    """A breach of the contract, in the way that the message says."""


@dataclass(frozen=True)
class AttackTrial:
    """An attack with the options to test it with, and the control on which it has to show that it leaks.

    Attributes:
        model: Name of an undefended model that it applies to.
        threat: The attacker's knowledge, number of uploads, defences. A server that changes weights must send
            the same to all clients.
        gain: PSNR in dB by which it must beat the grey picture on that model; None for an attack without this claim.
            An attack that reveals something else, and makes the claim, has to tell ``LABELS`` of the labels.
        tolerance: Largest difference of a pixel, or of an entry of a feature, between an upload attacked alone and in a
            stack.
        patch_size: Pixels per side of a patch, of pictures of 64.
        device: Where clients compute, and the attack.
    """

    attack: Attack[VitClassifier, Disclosure]
    model: str
    threat: ThreatModel = SINGLE_GRADIENT
    gain: float | None = 3.0
    tolerance: float = 1e-3
    patch_size: int = 8
    device: str = "cpu"

    def scenario(self, *defences: str, besides: Sequence[str] = ()) -> Scenario:
        """Return the scenario of the clients.

        Args:
            defences: Before those of the threat model.
            besides: After those.
        """
        shared = set(ThreatModel.model_fields) & set(Scenario.model_fields) - {"defences"}
        clients = self.threat.pipeline.clients * (SUMMED if any("secure_sum" in defence for defence in besides) else 1)
        values = {
            **self.threat.model_dump(include=shared),
            "model": {"name": self.model, "image_size": 64, "patch_size": self.patch_size},
            "defences": (*defences, *self.threat.defences, *besides),
            "clients": UPLOADS * clients,
            "pictures_per_client": self.threat.batch_size,
            "device": self.device,
        }
        return Scenario.parse(values)

    def uploads(self, model: VitClassifier) -> list[Upload]:
        """Return what the clients send, with labels and others where the threat model grants them, anew each time.

        Args:
            model: Defended or not.
        """
        return [_anew(exchange.upload) for exchange in _exchanges(self.scenario(*(["mjp"] if model.defended else [])))]

    def control(self, *defences: str) -> tuple[VitClassifier, list[Upload]]:
        """Return the small model and what the clients send, anew each time."""
        model = copy.deepcopy(_sent(self.scenario(*defences)))
        return model, self.uploads(model)

    def run(self, uploads: Sequence[Upload], model: VitClassifier) -> list[Disclosure]:
        """Attack with a generator of the suite's seed.

        Args:
            uploads: The clients' uploads.
            model: The model that they were sent.
        """
        generator = torch.Generator().manual_seed(SEED)
        return self.attack.run(uploads, model, self.threat, generator=generator)


def _network(scenario: Scenario) -> VitClassifier:
    return _drawn(scenario.network, scenario.device)


@lru_cache(maxsize=8)
def _drawn(network: ModelConfig, device: str) -> VitClassifier:
    return build_vit(network).to(device)


def _sent(scenario: Scenario) -> VitClassifier:
    """Return the model with the weights that clients are sent, if the server changes them."""
    changed = _exchanges(scenario)[0].changed if scenario.server else ()
    return with_weights(_network(scenario), changed[0] if changed else {})


@lru_cache(maxsize=16)
def _exchanges(scenario: Scenario) -> list[Exchange]:
    """Exchange with each client, or each group of clients whose updates are summed."""
    selection, model = select_for(scenario), _network(scenario)
    batches = selection.batches(scenario)
    return [scenario.exchange([selection.load(entry) for entry in batch], model=model) for batch in batches]


def _anew(upload: Upload, names: Sequence[str] | None = None) -> Upload:
    """Copy an upload with tensors of its own: all, or some."""
    tensors = {name: upload.tensors[name].clone() for name in (upload.tensors if names is None else names)}
    return replace(upload, tensors=tensors, others=tuple(_anew(sibling, names) for sibling in upload.others))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AttackConformanceError(message)


def _shown(disclosure: Disclosure) -> tuple[Tensor, ...]:
    """Return what a disclosure says: images, or labels and, where there are any, features."""
    if isinstance(disclosure, Reconstruction):
        return (disclosure.images,)
    return (disclosure.labels,) if disclosure.features is None else (disclosure.labels, disclosure.features)


def _same(former: Disclosure, latter: Disclosure, tolerance: float = 0.0) -> bool:
    pairs = list(zip(_shown(former), _shown(latter), strict=True))
    return all(
        left_part.shape == right_part.shape and float((left_part - right_part).abs().max()) <= tolerance
        for left_part, right_part in pairs
    )


def states_what_it_is(trial: AttackTrial) -> None:
    """Require the attributes that ``fedmjp list attacks`` prints.

    Args:
        trial: The attack and its control.
    """
    for attribute in STATED:
        text = getattr(trial.attack, attribute, "")
        _require(isinstance(text, str) and bool(text.strip()), f"states no {attribute}")


def gives_what_it_reveals(trial: AttackTrial) -> None:
    """Require one disclosure per upload, of pictures in [0, 1] and of the right shape, with and without a defence.

    Args:
        trial: The attack and its control.
    """
    for defences in ((), ("mjp",)):
        model, uploads = trial.control(*defences)
        if trial.attack.refusal(model, trial.threat):
            _require(bool(defences), f"{trial.attack.name} refuses its own control {trial.model}")
            continue
        disclosures = trial.run(uploads, model)
        _require(len(disclosures) == UPLOADS, f"{len(disclosures)} disclosures for {UPLOADS} uploads")
        size, count = model.image_size, trial.threat.batch_size
        for disclosed in disclosures:  # what is no picture, or not finite, could not be made
            first, *_ = _shown(disclosed)
            expected = (count, 3, size, size) if isinstance(disclosed, Reconstruction) else (count,)
            _require(tuple(first.shape) == expected, f"{trial.attack.reveals} of shape {tuple(first.shape)}")


def changes_nothing(trial: AttackTrial) -> None:
    """Require that uploads, model and torch's global generator stay as they are.

    Args:
        trial: The attack and its control.
    """
    model, uploads = trial.control()
    sources = [source for upload in uploads for source in (upload, *upload.others)]
    tensors_sent = copy.deepcopy([dict(upload.tensors) for upload in sources])
    weights, mode, state = copy.deepcopy(model.state_dict()), model.training, torch.random.get_rng_state()
    trial.run(uploads, model)
    for upload, tensors in zip(sources, tensors_sent, strict=True):
        for name, tensor in tensors.items():
            _require(torch.equal(upload.tensors[name], tensor), f"changes the upload's tensor {name}")
    state_now = model.state_dict()
    _require(weights.keys() == state_now.keys(), "changes what the model consists of")
    for name, tensor in weights.items():
        _require(torch.equal(state_now[name], tensor), f"changes the model's {name}")
    _require(model.training == mode, "leaves the model in another mode")
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        _require(not any(hooks), "leaves hooks on the model")
    _require(all(parameter.requires_grad for parameter in model.parameters()), "leaves parameters frozen")
    _require(torch.equal(torch.random.get_rng_state(), state), "draws from torch's global generator")


def is_deterministic(trial: AttackTrial) -> None:
    """Require the same result of the same generator, bit by bit.

    Args:
        trial: The attack and its control.
    """
    model, uploads = trial.control()
    for first, second in zip(trial.run(uploads, model), trial.run(uploads, model), strict=True):
        _require(_same(first, second), "two runs with the same generator differ")


def treats_uploads_independently(trial: AttackTrial) -> None:
    """Require that a result depends neither on what else is in the stack, nor on its place there.

    Args:
        trial: The attack and its control.
    """
    model, uploads = trial.control()
    stacked = trial.run(uploads, model)
    turned = trial.run(uploads[::-1], model)[::-1]
    alone = [trial.run([upload], model)[0] for upload in uploads]
    for case, results in (("alone", alone), ("in another place of the stack", turned)):
        for stacked_result, single_result in zip(stacked, results, strict=True):
            equal = _same(stacked_result, single_result, trial.tolerance)
            _require(equal, f"an upload {case} gives something else, by more than {trial.tolerance:g}")


def reads_what_it_declares(trial: AttackTrial) -> None:
    """Require the same result from the tensors that ``tensors`` names alone, and a refusal without one of them.

    Args:
        trial: The attack and its control.
    """
    model, (upload, *_) = trial.control()
    declared = list(trial.attack.tensors(model))
    if not declared:
        return
    try:
        whole, reduced = (trial.run([version], model)[0] for version in (upload, _anew(upload, declared)))
    except KeyError as error:
        raise AttackConformanceError(f"reads the tensor {error}, which it does not declare") from error
    _require(_same(whole, reduced), "reads tensors that it does not declare")
    if len(declared) > 1:
        _expect_refusal(trial, _anew(upload, declared[1:]), model, f"an upload without {declared[0]}")


def refuses_what_it_cannot_attack(trial: AttackTrial) -> None:
    """Require that uploads of another kind or number of pictures, or of other shapes, are refused with a reason.

    Args:
        trial: The attack and its control.
    """
    model, (upload, *_) = trial.control()
    foreign_kind: UpdateKind = "delta" if upload.kind == "gradient" else "gradient"
    count = upload.num_examples + 1
    _expect_refusal(
        trial, replace(upload, kind=foreign_kind), model, f"a {foreign_kind}, which its threat model excludes"
    )
    _expect_refusal(trial, replace(upload, num_examples=count), model, f"an upload of {count} pictures")
    declared = list(trial.attack.tensors(model))
    if declared:
        cut = {**upload.tensors, declared[0]: upload.tensors[declared[0]][..., :1]}
        _expect_refusal(trial, replace(upload, tensors=cut), model, f"a cut tensor {declared[0]}")


def refuses_sums_and_what_is_withheld(trial: AttackTrial) -> None:
    """Require a refusal of sums over clients unless it takes them, and of withheld tensors that it reads, by name.

    Args:
        trial: The attack and its control.
    """
    model, _ = trial.control()
    if trial.threat.pipeline.clients == 1:
        summed = trial.scenario(besides=(f"secure_sum:clients={SUMMED}",))
        refusal = trial.attack.refusal(model, summed.threat)
        _require(bool(refusal) is not trial.attack.takes_sums, f"with a sum over clients its refusal is {refusal!r}")
        if trial.attack.takes_sums:
            disclosures = _disclosed(trial.attack, summed, UPLOADS)
            count = sum(len(_shown(disclosure)[0]) for disclosure in disclosures or ())
            _require(count == UPLOADS * summed.threat.pictures, f"gives no {trial.attack.reveals} of a sum")
    declared = set(trial.attack.tensors(model))
    for role in roles_of(model):
        withheld = trial.scenario(besides=(f"withhold:roles={role}",)).threat
        missing = declared & withheld.pipeline.withheld(model)
        refusal = trial.attack.refusal(model, withheld) or ""
        complete = bool(refusal) and all(name in refusal for name in missing)
        _require(complete if missing else not refusal, f"without {role} its refusal is {refusal!r}")


def adapts_to_what_it_claims(trial: AttackTrial) -> None:
    """Require that it nearly reaches measured attacks wherever it counts as adapted to a degraded upload.

    Where these attacks, or it, refuse or fail, nothing is compared: a failure that is told proves nothing. Attacks that
    reveal no pictures are not compared.

    Args:
        trial: The attack and its control.
    """
    if trial.threat.defences or trial.threat.batch_size > 1 or trial.attack.reveals != "pictures":
        return
    for first_defences, degraded in product(((), ("mjp",)), DEGRADED):
        scenario = trial.scenario(*first_defences, besides=(degraded,))
        if not trial.attack.adapted(scenario.pipeline, _network(scenario), scenario.threat):
            continue
        mine = _decibels(trial.attack, scenario, 1)
        yardsticks = [_yardstick(name, scenario) for name in YARDSTICKS]
        best = max((value for value in yardsticks if value is not None), default=None)
        if mine is None or best is None:
            continue
        text = f"is adapted to {scenario.pipeline.label}, and gives {mine:.1f} dB where {best:.1f} dB are possible"
        _require(mine >= best - WITHIN, text)


@lru_cache(maxsize=64)
def _yardstick(name: str, scenario: Scenario) -> float | None:
    return _decibels(ATTACKS.get(name)(), scenario, 1)


def _decibels(attack: Attack[VitClassifier, Disclosure], scenario: Scenario, count: int) -> float | None:
    """Return the mean PSNR in dB of the pictures that it makes of so many uploads; None if it refuses or fails."""
    disclosures = _disclosed(attack, scenario, count)
    if disclosures is None:
        return None
    images = torch.cat([_shown(disclosure)[0] for disclosure in disclosures])
    private = torch.cat([exchange.private.clean for exchange in _exchanges(scenario)[:count]])
    return float(metric("psnr").function(images, private).mean())


def _disclosed(attack: Attack[VitClassifier, Disclosure], scenario: Scenario, count: int) -> list[Disclosure] | None:
    """Return what it makes of so many uploads; None if it refuses or fails."""
    uploads = [_anew(exchange.upload) for exchange in _exchanges(scenario)[:count]]
    model, generator = copy.deepcopy(_sent(scenario)), torch.Generator().manual_seed(SEED)
    try:
        return attack.run(uploads, model, scenario.threat, generator=generator)
    except (AttackFailedError, AttackNotApplicableError):
        return None


def leaks_on_its_control(trial: AttackTrial) -> None:
    """Require that it beats a guess on the undefended model: an attack that does not proves nothing elsewhere.

    Args:
        trial: The attack and its control.
    """
    if trial.gain is None:
        return
    model, uploads = trial.control()
    disclosed, exchanges = trial.run(uploads, model), _exchanges(trial.scenario())
    if trial.attack.reveals != "pictures":
        accuracy = metric("label_accuracy").function
        pairs = zip(disclosed, exchanges, strict=True)
        right = float(
            torch.cat([accuracy(_shown(images)[0], exchange.private.labels) for images, exchange in pairs]).mean()
        )
        _require(right >= LABELS, f"{trial.attack.name} tells {right:.0%} of the labels, not {LABELS:.0%}")
        return
    psnr = metric("psnr").function
    images = torch.cat([_shown(result)[0] for result in disclosed])
    private = torch.cat([exchange.private.clean for exchange in exchanges])
    gained = float((psnr(images, private) - psnr(torch.full_like(private, 0.45), private)).mean())
    text = f"{trial.attack.name} beats the grey picture by {gained:.1f} dB on {trial.model}, not by {trial.gain:.1f} dB"
    _require(gained >= trial.gain, text)


CHECKS: tuple[Callable[[AttackTrial], None], ...] = (
    states_what_it_is,
    gives_what_it_reveals,
    changes_nothing,
    is_deterministic,
    treats_uploads_independently,
    reads_what_it_declares,
    refuses_what_it_cannot_attack,
    refuses_sums_and_what_is_withheld,
    adapts_to_what_it_claims,
    leaks_on_its_control,
)


def _expect_refusal(trial: AttackTrial, upload: Upload, model: VitClassifier, subject: str) -> None:
    try:
        trial.run([upload], model)
    except AttackNotApplicableError as error:
        _require(bool(str(error).strip()), f"refuses {subject} without saying why")
        return
    raise AttackConformanceError(f"accepts {subject}")
