"""The attacker's side of an audit: the app's network, its uploads and its recipe in, disclosures and refusals out."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.embedding_rows import NAME as EMBEDDING_ROWS
from fedmjp.attacks.embedding_rows import Tokens, read_tokens
from fedmjp.benchmarks.audit.network import Network
from fedmjp.errors import Failure, FedmjpError
from fedmjp.models import names
from fedmjp.models.layers import LayeredNetwork
from fedmjp.models.sent import SentWeights
from fedmjp.processes import raise_on_alarm
from fedmjp.records import Disclosure, Upload
from fedmjp.threat import FLOAT32, ThreatModel

# What is run on every upload that it applies to: seconds each. Searches take minutes to hours.
RUN = (
    "patch_embedding",
    "patch_embedding_wiener",
    "class_token",
    "linear_inputs",
    "feature_inversion",
    "labels",
    "grey",
)
OF_LAYERS = ("linear_inputs", "feature_inversion")  # they run the app's module itself, whatever it is
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "feature_inversion": {"seconds": 20.0},
    "linear_inputs": {"samples": 50_000},
}
BROKE = "broke down, which says nothing"
MOST_SECONDS = 30.0  # of processors, that one of them may take: where labels are hidden, class_token searches
NO_TIME = "not run: it takes longer than there is time for here"
LATE = f"did not end within {MOST_SECONDS:g} s of processors, which says nothing"
OF_EMBEDDINGS = "not run: this transformer's embeddings are attacked instead"
NOT_RUN = "not run: a search, of minutes to hours, or a guess that has another floor here"
SHIFTED = 1e-3  # relative difference of what moved together from which on it did not; rounding leaves 1e-7
MOST_PICTURES = 128  # behind an upload that is attacked


@dataclass(frozen=True)
class Attempt:
    """What became of one attack on one upload."""

    attack: str
    reveals: str
    role: str
    applies: bool
    reason: str  # why it does not apply, was not run, or failed; what a reader must know of it otherwise
    made: Disclosure | Tokens | None = None
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        """Tell whether there is a result."""
        return self.made is not None


def attempt_all(
    network: Network,
    update: Mapping[str, Tensor],
    threat: ThreatModel,
    *,
    unreadable: str | None = None,
    seconds: float = MOST_SECONDS,
    change: Mapping[str, Tensor] | None = None,
) -> list[Attempt]:
    """Run every quick attack of the registry that applies to an update, and say of the others why not.

    Args:
        network: With the weights that the server sent.
        update: Gradient or change of the weights, by the app's names.
        threat: What the server knows of it.
        unreadable: Why nothing can be read of it at all, if that is so.
        seconds: Of the processors, that each of them may take.
        change: The update as it was sent, where that is another.
    """
    upload = _read(network, update, threat)
    layers_upload: Upload | Failure
    try:
        layers = network.in_layers(update)
        layers_upload = _read(layers, update, threat)
    except FedmjpError as error:
        layers, layers_upload = network, Failure(str(error))
    attempts = []
    if isinstance(layers.seen, LayeredNetwork) and layers.seen.whole_numbers:
        attempts.append(_attempt_tokens(layers.seen, update if change is None else change, threat))
    for name in ATTACKS:
        if name == "feature_inversion" and not isinstance(network.seen, SentWeights):
            attempts.append(Attempt(name, "pictures", "attack", applies=False, reason=OF_EMBEDDINGS))
        elif name in OF_LAYERS:
            attempts.append(attempt(name, layers, layers_upload, threat, unreadable, seconds))
        elif not name.startswith("oracle_"):
            attempts.append(attempt(name, network, upload, threat, unreadable, seconds))
    return attempts


def _attempt_tokens(network: LayeredNetwork, change: Mapping[str, Tensor], threat: ThreatModel) -> Attempt:
    """Read the tokens of texts, which rows of an embedding tell whatever the optimiser."""
    about = (EMBEDDING_ROWS, "tokens", "attack")
    try:
        steps = threat.local_steps if threat.update == "delta" else 1
        return Attempt(*about, applies=True, reason="", made=read_tokens(network, change, steps))
    except FedmjpError as error:
        return Attempt(*about, applies=False, reason=str(error))


def _read(network: Network, update: Mapping[str, Tensor], threat: ThreatModel) -> Upload | Failure:
    try:
        return network.upload(update, threat)
    except FedmjpError as error:
        return Failure(str(error))


def attempt(
    name: str,
    network: Network,
    upload: Upload | Failure,
    threat: ThreatModel,
    unreadable: str | None = None,
    seconds: float = MOST_SECONDS,
) -> Attempt:
    """Run an attack on an upload, or say why it does not apply; in place of an upload, why there is none.

    Args:
        name: Registered name of the attack.
        network: The app's, with the weights that the server sent.
        upload: What the client sent, or the reason why it cannot be read.
        threat: What the server knows.
        unreadable: Why nothing can be read of the update, if that is so.
        seconds: Of the processors, that it may take.
    """
    try:
        attack = ATTACKS.get(name)(OPTIONS.get(name, {}))
    except FedmjpError as error:
        return Attempt(name, "pictures", "attack", applies=False, reason=str(error))
    about = (name, attack.reveals, attack.role)
    try:
        if refusal := _refusal(attack, network, upload, threat, unreadable):
            return Attempt(*about, applies=False, reason=refusal)
        if name not in RUN:
            return Attempt(*about, applies=True, reason=NOT_RUN)
        if float(OPTIONS.get(name, {}).get("seconds", 0)) > seconds:
            return Attempt(*about, applies=True, reason=NO_TIME)
        started = time.monotonic()
        adversary = Adversary(network.seen, threat, seed=0)  # type: ignore[arg-type]  # what needs a network has one
        with _limited(seconds):
            disclosure = adversary.reconstruct(name, [upload], OPTIONS.get(name, {}), on_progress=lambda *_: None)[0]  # type: ignore[list-item]
        caveat = attack.caveat(network.seen, threat) or ""  # type: ignore[arg-type]
    except (FedmjpError, LookupError, AttributeError) as error:
        return Attempt(*about, applies=False, reason=str(error) or type(error).__name__)
    except TimeoutError:
        return Attempt(*about, applies=True, reason=LATE)
    except (ArithmeticError, RuntimeError, ValueError) as error:  # of numbers that no audit chose
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return Attempt(*about, applies=True, reason=f"{BROKE}: {first}")
    return Attempt(*about, applies=True, reason=caveat, made=disclosure, seconds=time.monotonic() - started)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError once the processors have worked so long; in other threads than the main one, nothing does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGPROF, raise_on_alarm(TimeoutError, signal.ITIMER_PROF))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def _refusal(
    attack: Any, network: Network, upload: Upload | Failure, threat: ThreatModel, unreadable: str | None
) -> str | None:
    """Explain why an attack cannot be run on this upload; floors need nothing of it."""
    if attack.role != "floor":
        if unreadable is not None:
            return unreadable
        if threat.pictures > MOST_PICTURES:
            return f"{threat.pictures} examples are behind an upload; more than {MOST_PICTURES} are not attacked"
    if attack.needs_network and not network.whole:
        return f"needs a vision transformer that it can run: {network.why}"
    refusal: str | None = attack.refusal(network.seen, threat)
    if refusal or isinstance(upload, Failure):
        return refusal or str(upload)
    missing = [tensor for tensor in attack.tensors(network.seen) if tensor not in upload.tensors]
    return f"the app does not send {', '.join(missing)}, which it reads" if missing else None


def shift_of_tokens(tensors: Mapping[str, Tensor], prefix_tokens: int) -> Tensor | None:
    """Compute what gradients of any loss leave at zero: what the tokens' shifts moved, less what they moved together.

    The patch embedding's bias is added to every patch, and the class token to one position: its gradient is the sum of
    the positions' gradients, of any batch and after any number of steps of SGD.

    Args:
        tensors: Update or weights, by the names of ``fedmjp.models.names``.
        prefix_tokens: Positions before those of patches.

    Returns:
        float64 (dim,); None where patch bias or positions are missing.
    """
    if names.PATCH_BIAS not in tensors or names.POSITION_EMBEDDING not in tensors:
        return None
    rows = tensors[names.POSITION_EMBEDDING].detach().double().flatten(0, 1)[prefix_tokens:]
    return rows.sum(0) - tensors[names.PATCH_BIAS].detach().double()


def decay_in_loss(network: Network, update: Mapping[str, Tensor], threat: ThreatModel) -> tuple[float, str | None]:
    """Estimate a multiple of the weights in an update, as a penalty on their squares leaves; and what else is in it.

    Args:
        network: The app's, with the weights that the server sent.
        update: Gradient or change of the weights, by the app's names.
        threat: What the server knows of it.

    Returns:
        The multiple, 0.0 where nothing speaks for one; and why the update is no gradient of a loss, None if it may be.
    """
    if isinstance(network.seen, SentWeights) or threat.local_optimiser != "sgd":
        return 0.0, None
    try:
        tensors, weights = network.upload(update, threat).tensors, dict(network.seen.named_parameters())
    except FedmjpError:
        return 0.0, None
    shift, shift_of_weights = (shift_of_tokens(state, network.seen.prefix_tokens) for state in (tensors, weights))
    if shift is None or shift_of_weights is None:
        return 0.0, None
    moved = float(tensors[names.PATCH_BIAS].double().norm())
    if not moved or not bool(tensors[names.POSITION_EMBEDDING].any()):
        return 0.0, None  # one of them is frozen
    rows = weights[names.POSITION_EMBEDDING].detach().double()
    rounding = 4 * FLOAT32 * float(rows.norm()) if threat.update == "delta" else 0.0
    allowed = max(SHIFTED * moved, 10 * rounding)
    if float(shift.norm()) <= allowed:
        return 0.0, None
    multiple = float(shift @ shift_of_weights / shift_of_weights.square().sum().clamp_min(1e-30))
    if float((shift - multiple * shift_of_weights).norm()) <= max(allowed, 0.01 * float(shift.norm())):
        return multiple, None
    share = float(shift.norm()) / max(moved, 1e-30)
    return 0.0, (
        f"the update is no gradient of one step: the patches' bias moved otherwise than all positions together, by "
        f"{share:.0%} of its length, which no loss of pictures does"
    )


def classes_held(network: Network, update: Mapping[str, Tensor], *, is_gradient: bool) -> list[int] | None:
    """List classes whose bias in the last layer a client raised, as any optimiser does for those that it holds.

    Args:
        network: The app's, with the weights that the server sent.
        update: Gradient or change of the weights, by the app's names.
        is_gradient: Whether it is a gradient, whose sign is the opposite.

    Returns:
        None where the bias was not sent, or did not move.
    """
    if network.head is None or network.head[1] not in update:
        return None
    moved = update[network.head[1]].double() * (-1 if is_gradient else 1)
    return moved.gt(0).nonzero().flatten().tolist() if moved.any() else None
