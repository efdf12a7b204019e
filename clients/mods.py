"""Defences as Flower mods, for anybody's app: ``ClientApp(mods=[defence_mod("local_dp", epsilon=8.0)])``.

A mod changes the reply to a train message before it leaves the app. What it does not touch:

- **Metrics and settings in the reply leave in clear**: losses, accuracies, numbers of examples. So do whole numbers
  among the arrays (counters of a normalisation layer).
- Replies to other messages (evaluate, query) pass.
- A mod is code of the app: it holds for honest apps.

Where a defence cannot protect a reply, an error leaves in its place, with a reason that holds no data, and the round
goes on with the other clients. That a reply was refused is seen by the server, and no guarantee covers it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from clients.budget import Ledger
from fedmjp.config import UpdateKind
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import Client, Defence, require_finite
from fedmjp.defences.clipping import global_norm
from fedmjp.defences.local_dp import LocalDp
from fedmjp.errors import ConfigError, DefenceError, FedmjpError
from fedmjp.models.roles import roles_of_tensors
from fedmjp.randomness import Randomness, SystemRandomness
from fedmjp.wire import FARTHEST, REFUSED

Kind = Literal["weights", "gradient"]


def defence_mod(
    name: str,
    *,
    kind: Kind | None = None,
    ledger: str | Path | None = None,
    budget: float | None = None,
    randomness: Randomness | None = None,
    **options: Any,
) -> Mod:
    """A defence as a Flower mod.

    Several are composed by listing them. Flower hands the reply to the last mod first, and after noise the next one
    cannot see that a reply holds weights::

        ClientApp(mods=[defence_mod("round", kind="weights"), defence_mod("local_dp", epsilon=8.0)])

    A reply of weights has its difference to what the server had sent protected, and added back; tensors that are
    withheld return as they were sent. A reply of gradients is protected itself; what is withheld is zero.

    Args:
        name: Of a defence that acts on updates; see ``fedmjp list defences``.
        kind: What the reply holds. None takes it for weights, and refuses it where it cannot be told: if it has
            other names or shapes than what was sent, or is so far from it that it may be a gradient.
        ledger: File that counts uploads over restarts, for ``local_dp``. It is made if it does not exist.
        budget: Epsilon over all uploads in the ledger, at the defence's delta; further ones are refused.
        randomness: For tests. Everything else takes the operating system's, whatever the app seeds.
        options: Of the defence.

    Raises:
        UnknownNameError: If there is no such defence.
        ConfigError: If an option is out of range, or the defence needs what no mod sees.
    """
    defence = DEFENCES.get(name)(options)
    if set(defence.stages) != {"update"} or defence.needs_model:
        needs = "with the model and the pictures" if defence.needs_model else "on " + " and ".join(defence.stages)
        raise ConfigError(
            f"{name} works {needs}, which no mod sees; use it with `fedmjp simulate --defence {name}`, or name a "
            "defence of updates"
        )
    if kind not in (None, *get_args(Kind)):
        raise ConfigError(f"kind = {kind!r}: must be {' or '.join(get_args(Kind))}")
    return _DefenceMod(defence, kind, _charge(defence, ledger, budget), randomness or SystemRandomness())


def _charge(defence: Defence, ledger: str | Path | None, budget: float | None) -> Callable[[], object]:
    """What counts an upload."""
    if ledger is None:
        if budget is not None:
            raise ConfigError(f"budget = {budget!r} needs a ledger: name the file that counts uploads")
        return lambda: None
    if not isinstance(defence, LocalDp):
        raise ConfigError(f"{defence.name} gives no guarantee that a ledger could count; use it with local_dp")
    kept, multiplier = Ledger(ledger, delta=defence.options.delta, budget=budget), defence.multiplier
    return lambda: kept.charge(multiplier)


@dataclass(frozen=True)
class _DefenceMod:
    defence: Defence
    kind: Kind | None
    charge: Callable[[], object]
    randomness: Randomness

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """As Flower calls a mod."""
        if message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        # Before the app runs, which may change the message.
        sent = [dict(record) for record in message.content.array_records.values()]
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            self._protect(reply, [ArrayRecord(record) for record in sent])
        except FedmjpError as error:
            return _refusal(message, str(error))
        except Exception as error:  # noqa: BLE001 (whatever it is, the reply must not leave)
            # Its text may quote data.
            return _refusal(message, f"{self.defence.name}: {type(error).__name__}; the update does not leave")
        return reply

    def _protect(self, reply: Message, sent: list[ArrayRecord]) -> None:
        """Put the protected arrays into the reply, last of all."""
        records = dict(reply.content.array_records)
        if len(records) != 1:
            raise DefenceError(f"{self.defence.name}: the reply has {len(records)} array records, it must have one")
        ((key, record),) = records.items()
        tensors = _tensors(record)
        require_finite(tensors, self.defence.name)
        if not any(tensor.is_floating_point() for tensor in tensors.values()):
            raise DefenceError(f"{self.defence.name}: the reply has no tensors of real numbers to protect")
        base = self._base(tensors, sent)
        kind: UpdateKind = "gradient" if self.kind == "gradient" else "delta"
        client = Client(kind, roles_of_tensors(tensors), _examples(reply))
        update = {name: _minus(tensor, base[name]) for name, tensor in tensors.items()}
        protected = self.defence.protect(update, client, randomness=self.randomness)
        leaving = {
            name: _plus(base[name], protected[name]).to(tensor.dtype) if name in protected else base[name]
            for name, tensor in tensors.items()
        }
        self.charge()
        reply.content[key] = ArrayRecord(leaving)

    def _base(self, tensors: Mapping[str, Tensor], sent: list[ArrayRecord]) -> dict[str, Tensor]:
        """What the reply is relative to: the weights that were sent, or zeros."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        if self.kind == "gradient":
            return zeros
        fitting = [weights for weights in map(_tensors, sent) if _layout(weights) == _layout(tensors)]
        if len(fitting) != 1:
            raise DefenceError(
                f"{self.defence.name}: the reply has not the names and shapes of the weights that were sent; "
                'if it holds gradients, set kind="gradient"'
            )
        base = fitting[0]
        if self.kind is None:
            moved = {name: _minus(tensor, base[name]) for name, tensor in tensors.items()}
            length = global_norm(base)
            # From weights of zeros both kinds are the same numbers.
            if length and not global_norm(moved) <= FARTHEST * length:
                raise DefenceError(
                    f"{self.defence.name}: the reply is so far from the weights that were sent that it may be a "
                    'gradient; set kind="weights" or kind="gradient"'
                )
        return base


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    tensors = dict(record.to_torch_state_dict())
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise DefenceError(f"tensor {name!r} holds complex numbers, which no defence protects")
    return tensors


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}


def _minus(tensor: Tensor, base: Tensor) -> Tensor:
    """In float32 at least; whole numbers as they are."""
    if not tensor.is_floating_point():
        return tensor
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide) - base.to(wide)


def _plus(base: Tensor, change: Tensor) -> Tensor:
    return base.to(change.dtype) + change if change.is_floating_point() else change


def _examples(reply: Message) -> int:
    for record in reply.content.metric_records.values():
        for name in ("num-examples", "num_examples"):
            if isinstance(count := record.get(name), int) and count > 0:
                return count
    return 1


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(code=REFUSED, reason=reason), reply_to=message)
