"""A conformance suite for defences, ours and other people's; see ``fedmjp/defences/README.md`` for how it is called.

Everything runs on a tiny untrained transformer, without a network. Each check takes a ``Trial``, returns nothing, and
raises ``ConformanceError``, which says what the defence did wrong. Checks of updates pass for a defence that acts
elsewhere.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedmjp.config import ModelConfig
from fedmjp.defences.base import FULL_BITS, Client, Defence
from fedmjp.defences.pipeline import ORDER
from fedmjp.errors import DefenceError
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.roles import roles_of_tensors
from fedmjp.randomness import SeededRandomness
from fedmjp.seeds import torch_generator

SEED = 0
EXAMPLES = 3
LARGE = 100_000  # entries of the tensor on which noise is measured


class ConformanceError(AssertionError):
    """A breach of the contract, which the message describes."""


@dataclass(frozen=True)
class Trial:
    """A defence under test."""

    defence: Defence  # ready to use, with the options that the suite is to run with
    tolerance: float = 0.1  # largest relative error of ``noise_on`` against the measured standard deviation

    def update(self) -> dict[str, Tensor]:
        """Make tensors of all kinds that an update can hold, anew each time."""
        drawn = torch_generator(SEED, "update")
        parameters = _network().named_parameters()
        update = {name: 0.01 * torch.randn(parameter.shape, generator=drawn) for name, parameter in parameters}
        return {
            "large": torch.randn(LARGE, generator=drawn),
            "heavy": 1e-4 * torch.randn(500, generator=drawn) ** 3,
            "scalar": torch.tensor(0.25),
            "zeros": torch.zeros(7),
            "empty": torch.zeros(0),
            "counters": torch.tensor([3, 2**40]),
            "counter": torch.tensor(7),
            **update,
        }

    def client(self) -> Client:
        """Make what the client of the update knows."""
        images = torch.rand(EXAMPLES, 3, 16, 16, generator=torch_generator(SEED, "images"))
        roles = roles_of_tensors(self.update())
        return Client("gradient", roles, EXAMPLES, _network(), images)

    def protect(self, update: Mapping[str, Tensor], seed: int = SEED) -> dict[str, Tensor]:
        """Protect an update.

        Args:
            update: Tensors by name.
            seed: Of the randomness.
        """
        return self.defence.protect(update, self.client(), randomness=SeededRandomness(seed))

    def protected(self, seed: int = SEED) -> dict[str, Tensor]:
        """Protect the suite's own update.

        Args:
            seed: Of the randomness.
        """
        return self.protect(self.update(), seed)

    @property
    def acts_on_updates(self) -> bool:
        """Tell whether ``protect`` is called at all."""
        return "update" in self.defence.stages


@lru_cache(maxsize=1)
def _network() -> VitClassifier:
    model = build_vit(ModelConfig(name="deit_micro", image_size=16, patch_size=8, classes=5))
    drawn = torch_generator(SEED, "network")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=drawn))
    return model


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def _same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _real(update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in update.items() if tensor.is_floating_point()}


def describes_itself(trial: Trial) -> None:
    """Check that texts for tables are there, and that every option has a default and says what it is.

    Args:
        trial: The defence under test.
    """
    defence = trial.defence
    for attribute in ("name", "paper", "summary", "told"):
        text = getattr(defence, attribute, "")
        _require(bool(text) and "\n" not in text, f"{attribute} must be one line, is {text!r}")
    stages = defence.stages
    _require(bool(stages) and set(stages) <= set(ORDER), f"stages must be of {', '.join(ORDER)}, are {stages}")
    for name, option in type(defence.options).model_fields.items():
        _require(bool(option.description), f"option {name} has no description")
        _require(not option.is_required(), f"option {name} has no default")


def changes_nothing_that_it_is_given(trial: Trial) -> None:
    """Check that the update, the client's model and torch's global generator stay as they were.

    Args:
        trial: The defence under test.
    """
    update, state = trial.update(), torch.random.get_rng_state()
    weights = copy.deepcopy(_network().state_dict())
    trial.protect(update)
    gradients = {name: torch.stack([tensor] * EXAMPLES) for name, tensor in _real(update).items()}
    if "examples" in trial.defence.stages:
        copies, single = copy.deepcopy(gradients), {name: gradient[:1] for name, gradient in gradients.items()}
        protected = trial.defence.protect_examples(single, randomness=SeededRandomness(SEED))
        _require(_same(copies, gradients), "changes the gradients that it is given")
        for name, gradient in gradients.items():
            _require(protected[name].shape == gradient.shape[1:], f"{name} has another shape than its gradient")
    _require(_same(update, trial.update()), "changes the update that it is given")
    _require(_same(weights, _network().state_dict()), "changes the client's model")
    _require(torch.equal(torch.random.get_rng_state(), state), "draws from torch's global generator")


def is_deterministic(trial: Trial) -> None:
    """Check that equal randomness gives equal updates, bit by bit, and another gives other noise, if any is drawn.

    Args:
        trial: The defence under test.
    """
    _require(_same(trial.protected(), trial.protected()), "two calls with the same randomness differ")
    if trial.acts_on_updates and "noisy" in trial.defence.marks:
        _require(not _same(trial.protected(), trial.protected(seed=SEED + 1)), "its noise is always the same")
    if not trial.defence.draws:
        _require(_same(trial.protected(), trial.protected(seed=SEED + 1)), "draws, but says that it does not")


def keeps_layout(trial: Trial) -> None:
    """Check that names, shapes and types stay, and that what is missing is exactly what is withheld.

    Args:
        trial: The defence under test.
    """
    update, protected = trial.update(), trial.protected()
    withheld = trial.defence.withheld(trial.client().roles)
    _require(set(update) - set(protected) == withheld, "what is missing is not what it says that it withholds")
    _require(list(protected) == [name for name in update if name in protected], "changes the order of tensors")
    for name, tensor in protected.items():
        _require(tensor.shape == update[name].shape, f"{name} has another shape")
        _require(tensor.dtype == update[name].dtype, f"{name} has another type")
        _require(tensor.device == update[name].device, f"{name} is on another device")


def leaves_counters(trial: Trial) -> None:
    """Check that whole numbers pass as they are, or do not move under a guarantee, and change nothing else.

    Args:
        trial: The defence under test.
    """
    update = trial.update()
    counters = [name for name in update if not update[name].is_floating_point()]
    protected = trial.protect(update)
    guarantees = "update" in trial.defence.stages and trial.defence.spent(1) is not None
    for name in counters:
        due = torch.zeros_like(update[name]) if guarantees else update[name]
        _require(torch.equal(protected.get(name, due), due), f"changes the whole numbers of {name}")
    without = trial.protect(_real(update))
    _require(_same(_real(protected), without), "whole numbers change what becomes of other tensors")


def protects_scalars(trial: Trial) -> None:
    """Check that a tensor without dimensions is treated as any other.

    Args:
        trial: The defence under test.
    """
    alone = {**trial.update(), "scalar": torch.tensor(5000.0)}
    protected = trial.protect(alone).get("scalar")
    if protected is None:
        return
    if trial.acts_on_updates and trial.defence.marks & {"noisy", "scaled"} and trial.defence.scope == "update":
        _require(float(protected) != 5000.0, "a tensor without dimensions leaves as it is")
    as_vector = trial.protect({**alone, "scalar": alone["scalar"].reshape(1)})["scalar"]
    _require(torch.equal(protected, as_vector[0]), "a tensor without dimensions is not treated as one with one entry")


def survives_zeros(trial: Trial) -> None:
    """Check that an update of zeros gives finite numbers.

    Args:
        trial: The defence under test.
    """
    protected = trial.protect({name: torch.zeros_like(tensor) for name, tensor in trial.update().items()})
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in protected.values())
    _require(finite, "an update of zeros gives NaN or infinite values")


def hides_no_broken_numbers(trial: Trial) -> None:
    """Check that NaN and infinite values are refused, or stay visible.

    Args:
        trial: The defence under test.
    """
    for broken in (float("nan"), float("inf")):
        update = trial.update()
        update["large"][3] = broken
        try:
            protected = trial.protect(update)
        except DefenceError as error:
            _require(bool(str(error).strip()), "refuses without saying why")
            continue
        visible = "large" not in protected or not bool(torch.isfinite(protected["large"][3]))
        _require(visible, f"hides {broken} behind a finite number")


def protects_parts_as_the_whole(trial: Trial) -> None:
    """Check that with the scope "tensor", protecting a part gives that part of the protected whole, bit by bit.

    Args:
        trial: The defence under test.
    """
    if trial.defence.scope != "tensor":
        return
    whole = trial.protected()
    for name, tensor in trial.update().items():
        part = trial.protect({name: tensor})
        expected = {name: whole[name]} if name in whole else {}
        _require(_same(part, expected), f"{name} alone is protected otherwise than in the whole update")


def adds_the_noise_that_it_states(trial: Trial) -> None:
    """Check ``noise_on`` against the difference of two calls with other randomness, over the root of 2.

    Args:
        trial: The defence under test.
    """
    defence = trial.defence
    if trial.acts_on_updates and "large" in trial.protected():
        first, second = (trial.protected(seed)["large"] for seed in (SEED, SEED + 1))
    elif "examples" in defence.stages:
        gradients = {"large": torch.stack([trial.update()["large"]])}
        first, second = (
            defence.protect_examples(gradients, randomness=SeededRandomness(seed))["large"] for seed in (SEED, SEED + 1)
        )
    else:
        return
    measured, stated = float((first - second).double().std()) / 2**0.5, defence.noise_on(first)
    _require((stated > 0) == ("noisy" in defence.marks), "its marks and noise_on disagree on whether there is noise")
    close = abs(measured - stated) <= trial.tolerance * stated
    _require(close, f"noise_on says {stated:.3g}, measured {measured:.3g}")


def rounds_as_it_states(trial: Trial) -> None:
    """Check that ``rounding`` bounds the relative error of an entry, but for those far below the tensor's largest.

    Args:
        trial: The defence under test.
    """
    defence = trial.defence
    if not defence.rounding:
        _require("rounded" not in defence.marks, "is marked as rounded, but states no error")
        return
    for name, tensor in _real(trial.update()).items():
        floor = 2.0**-30 * float(tensor.abs().max()) if tensor.numel() else 0.0
        error = (trial.protected()[name] - tensor).abs()
        _require(bool((error <= defence.rounding * tensor.abs() + floor).all()), f"{name} is off by more than stated")


def needs_no_more_bits(trial: Trial) -> None:
    """Check that an encoder never needs more bits after a defence than before.

    Args:
        trial: The defence under test.
    """
    for incoming in (FULL_BITS, 16.0, 8.0, 1.0, 0.1):
        outgoing = trial.defence.bits(incoming)
        _require(0 < outgoing <= incoming, f"needs {outgoing:.3g} bits per value of {incoming:.3g} before")


def spends_more_with_every_upload(trial: Trial) -> None:
    """Check that a guarantee starts at no cost and that every upload adds to it.

    Args:
        trial: The defence under test.
    """
    spent = [trial.defence.spent(uploads) for uploads in (0, 1, 2, 10)]
    guarantees = [cost for cost in spent if cost is not None]
    if not guarantees:
        return
    _require(len(guarantees) == len(spent), "gives a guarantee for some numbers of uploads only")
    epsilons = [cost.epsilon for cost in guarantees]
    _require(epsilons[0] == 0, "no upload costs nothing")
    _require(epsilons == sorted(set(epsilons)), "more uploads do not cost more")


def draws_ahead_what_it_arranges(trial: Trial) -> None:
    """Check that what it draws before the pictures are there arranges them as ``arrange`` does.

    Args:
        trial: The defence under test.
    """
    size = 64
    images = torch.rand(EXAMPLES, 3, size, size, generator=torch.Generator().manual_seed(SEED))
    sources = [SeededRandomness(SEED).of("picture", place) for place in range(EXAMPLES)]
    drawn = trial.defence.ahead(size // 8, randomness=sources)
    if drawn is None:
        return
    arranged = trial.defence.shown(images, drawn)
    expected = trial.defence.arrange(images, size // 8, randomness=sources)
    for part in ("images", "mask", "source"):
        same = torch.equal(getattr(arranged, part), getattr(expected, part))
        _require(same, f"what it draws ahead gives {part} other than arrange does")


CHECKS: tuple[Callable[[Trial], None], ...] = (
    describes_itself,
    changes_nothing_that_it_is_given,
    is_deterministic,
    keeps_layout,
    leaves_counters,
    protects_scalars,
    survives_zeros,
    hides_no_broken_numbers,
    protects_parts_as_the_whole,
    adds_the_noise_that_it_states,
    rounds_as_it_states,
    needs_no_more_bits,
    spends_more_with_every_upload,
    draws_ahead_what_it_arranges,
)
