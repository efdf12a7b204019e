"""Defences as Flower mods, for anybody's app: ``ClientApp(mods=[defence_mod("local_dp", epsilon=8.0)])``.

A mod changes the reply to a train message before it leaves the app. What it does not touch:

- **Metrics and settings in the reply leave in clear**: losses, accuracies, numbers of examples. So do whole numbers
  among the arrays (counters of a normalisation layer); under ``local_dp`` the server gets its own back.
- Replies to other messages (evaluate, query) pass.
- A mod is code of the app: it holds for honest apps.

Where a defence cannot protect a reply, an error leaves in its place, with a reason that holds no data, and the round
goes on with the other clients. That a reply was refused is seen by the server, and no guarantee covers it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from flwr.app import Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedmjp.clients.budget import Ledger
from fedmjp.clients.gate.mod import UploadGate
from fedmjp.clients.replies import Kind, SentArrays, read_update
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import Defence
from fedmjp.defences.local_dp import LocalDp
from fedmjp.errors import ConfigError, FedmjpError
from fedmjp.randomness import Randomness, SystemRandomness
from fedmjp.wire import REFUSED

__all__ = ["AuditMod", "UploadGate", "defence_mod"]

SITE = "fedmjp.benchmarks.audit.site"  # it stands above clients, and is imported by this name when it is used


def defence_mod(
    name: str,
    *,
    kind: Kind | None = None,
    ledger: str | Path | None = None,
    budget: float | None = None,
    randomness: Randomness | None = None,
    **options: Any,
) -> Mod:
    """Make a Flower mod of a defence.

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


class AuditMod:
    """Mod that writes the report of ``fedmjp audit`` at the site, on the owner's own data; nothing of it leaves.

    The first of ``mods`` sees what leaves after all of them::

        ClientApp(mods=[AuditMod(output="audit"), defence_mod("local_dp", epsilon=8.0)])

    The client answers as it would, and each watched round takes some minutes longer. Until the last of them, private
    batches lie in a folder beside the report that its owner alone can read. Of several clients that share a folder
    the first is audited. Patches of torch are put in place when the mod is made, so an app should make it before it
    takes functions out of ``torch.nn.functional``.

    Args:
        output: Folder of the report: ``report.html``, ``summary.html`` and ``report.json``.
        rounds: That are watched.

    Raises:
        ConfigError: If no round is to be watched.
        OutputError: If the folder holds files of somebody else's.
    """

    def __init__(self, output: str | Path, *, rounds: int = 2) -> None:
        if rounds < 1:
            raise ConfigError(f"rounds = {rounds!r}: must be at least 1")
        self.output, self.rounds = Path(output).resolve(), rounds
        import_module(SITE).begin(self.output)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer as the app does and audit the answer, as Flower calls a mod."""
        if message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        reply: Message = import_module(SITE).answer_watched(self.output, self.rounds, message, context, call_next)
        return reply


def _charge(defence: Defence, ledger: str | Path | None, budget: float | None) -> Callable[[], object]:
    """Make the function that counts an upload."""
    if ledger is None:
        if budget is not None:
            raise ConfigError(f"budget = {budget!r} needs a ledger: name the file that counts uploads")
        return lambda: None
    if not isinstance(defence, LocalDp):
        raise ConfigError(f"{defence.name} gives no guarantee that a ledger could count; use it with local_dp")
    spent, multiplier = Ledger(ledger, delta=defence.options.delta, budget=budget), defence.multiplier
    return lambda: spent.charge(multiplier)


@dataclass(frozen=True)
class _DefenceMod:
    defence: Defence
    kind: Kind | None
    charge: Callable[[], object]
    randomness: Randomness

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Protect the reply to a train message, as Flower calls a mod."""
        if message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        # Before the app runs, which may change the message.
        sent = SentArrays(message)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            self._protect(reply, sent)
        except FedmjpError as error:
            return _refusal(message, str(error))
        except Exception as error:  # noqa: BLE001 (whatever it is, the reply must not leave)
            # Its text may quote data.
            return _refusal(message, f"{self.defence.name}: {type(error).__name__}; the update does not leave")
        return reply

    def _protect(self, reply: Message, sent: SentArrays) -> None:
        """Put the protected arrays into the reply, last of all."""
        update = read_update(reply, sent, self.kind, self.defence.name)
        protected = self.defence.protect(update.change, update.client, randomness=self.randomness)
        record = update.record(protected)
        self.charge()
        reply.content[update.key] = record


def _refusal(message: Message, reason: str) -> Message:
    return Message(Error(code=REFUSED, reason=reason), reply_to=message)
