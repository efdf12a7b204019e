"""``UploadGate``: nothing leaves an app that the site's policy does not let out."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from logging import ERROR
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import log

from fedmjp.clients.gate.acceptance import require_accepted
from fedmjp.clients.gate.clear import find_bounds_refusal, find_clear_refusal, is_within, list_leaving
from fedmjp.clients.gate.incoming import ModelChecks
from fedmjp.clients.gate.ledger import Entry, GateLedger, find_last_form
from fedmjp.clients.gate.policy import Answer, Policy
from fedmjp.clients.gate.reading import ReplyReading, read_reply
from fedmjp.clients.gate.reasons import Reason, RefusedError, refusal
from fedmjp.clients.gate.rebuilding import Rebuilder, Rebuilt
from fedmjp.clients.gate.self_attack import AttackResults, try_reading, try_upload
from fedmjp.clients.gate.watching import Observation, TrainingWatch
from fedmjp.clients.replies import SentArrays, Update
from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness, SystemRandomness
from fedmjp.texts import printable

STRICTEST: tuple[Answer, ...] = ("refuse", "defend", "say")
WHO = "gate"
LONGEST = 1000  # letters of an app's error that the log at the site tells
KINDS = {"pictures": Reason.PICTURES, "features": Reason.FEATURES, "labels": Reason.LABELS}
UNKNOWN = frozenset({Reason.UNSEEN, Reason.UNJUDGED})  # what no defence makes up for
AFTER = ("patch_embedding_wiener", dict[str, Any]())  # what a defended upload is tried with besides


class UploadGate:
    """A Flower mod that lets out what the site's policy allows: ``ClientApp(mods=[UploadGate("policy.yaml")])``.

    It stands first in the list, so that it sees what really leaves. Each round it attacks the upload with the exact
    attacks of this package, compares with the batches that torch's hooks saw, and passes, defends or refuses. It fails
    closed: whatever goes wrong, an error leaves in place of the reply, with a reason that holds no data.

    As a mod it is code of the app and holds for honest apps. `fedmjp supernode --policy FILE` puts it where the app
    cannot leave it out.

    Args:
        policy: File of the policy, see ``fedmjp.clients.gate.policy.Policy``, or the policy itself.
        ledger: File of verdicts, where the policy is no file.
        randomness: For tests. Everything else takes the operating system's.
        clock: Seconds that the ledger counts.

    Raises:
        ConfigError: If the policy cannot be read or changed since it was accepted, or the ledger's folder does not
            exist.
    """

    def __init__(
        self,
        policy: str | Path | Policy,
        *,
        ledger: str | Path | None = None,
        randomness: Randomness | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(policy, Policy):
            self.policy, path = policy, Path(ledger or policy.ledger)
        else:
            self.policy, path = Policy.read(Path(policy))
        self.ledger = GateLedger(path)
        if not isinstance(policy, Policy):
            require_accepted(Path(policy), self.ledger)
        self.randomness, self.clock = randomness or SystemRandomness(), clock

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Judge the reply to a message, as Flower calls a mod."""
        visit = _Visit(self, message)
        try:
            reply = visit.reply(context, call_next)
            visit.note(self.policy)
        except RefusedError as error:
            return visit.refused(error.reason)
        except DefenceError as error:
            return visit.refused(Reason.JUDGED, str(error))
        except Exception as error:  # noqa: BLE001 (whatever it is, the reply must not leave)
            # Its text may quote data.
            _tell_site(f"{type(error).__name__}: {error}")
            return visit.refused(Reason.ERROR, type(error).__name__)
        return reply


def _tell_site(error: str) -> None:
    """Tell the log of this process, which is the site's, what the app's error says."""
    log(ERROR, "The app's error, which stays at this site: %s", printable(" ".join(error.split()))[:LONGEST])


class _Visit:
    """One message on its way through the gate, and what the ledger will say of it."""

    def __init__(self, gate: UploadGate, message: Message) -> None:
        self.gate, self.policy, self.message = gate, gate.policy, message
        self.started, self.inside, self.checking = gate.clock(), 0.0, 0.0
        metadata = message.metadata
        self.stop: Reason | None = None  # why training was ended
        self.checks = ModelChecks(self.policy, gate.ledger.path, metadata.dst_node_id, metadata.run_id)
        self.entry = Entry(
            run=metadata.run_id,
            node=metadata.dst_node_id,
            round=str(metadata.group_id),
            kind=metadata.message_type,
            verdict="refused",
        )

    def reply(self, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the app and return its reply as it may leave.

        Args:
            context: Of the app.
            call_next: The app.

        Raises:
            RefusedError: If the policy does not let it out; DefenceError if it cannot be judged.
        """
        if reason := find_bounds_refusal(self.message, self.policy.bounds):
            raise RefusedError(reason)
        # Before the app runs, which may change the message.
        sent, rebuilder = SentArrays(self.message), Rebuilder(self.message, self.policy)
        with TrainingWatch(lambda observed: self._check_model(observed, sent)).watching() as observed:
            reply = self._called(context, call_next)
        if self.stop is not None:  # whatever the app made of it
            raise RefusedError(self.stop)
        self._see(observed)
        if reply.has_error():
            # Whatever text the app put there is as good a way out as any.
            _tell_site(reply.error.reason or "no reason given")
            raise RefusedError(Reason.ANSWERED)
        training = self.message.metadata.message_type.split(".")[0] == "train"
        if reply.content.array_records and not training:
            raise RefusedError(Reason.ARRAYS)
        rebuilt = rebuilder.rebuild(reply.content)
        reply = Message(rebuilt.content, reply_to=self.message)
        self._say(leaves=list_leaving(rebuilt.content))
        reading = read_reply(reply, sent, self.policy.kind, WHO) if training else None
        if reason := find_clear_refusal(rebuilt.content, self.policy.clear, reading):
            raise RefusedError(reason)
        if reading is not None:
            self._judge(reply, reading, observed)
            self.checks.keep(reading)
            if self.policy.rounds or self.entry.verdict == "defended":
                rebuilt = rebuilder.rebuild(rebuilt.content, rounding=self.policy.rounds)
        self._count_bits(rebuilt)
        self._say(sha256=rebuilt.content.object_id)
        return Message(rebuilt.content, reply_to=self.message)

    def note(self, policy: Policy) -> None:
        """Write what was decided to the disk.

        Args:
            policy: Of the site.

        Raises:
            DefenceError: If that fails; nothing may leave then.
        """
        if self.entry.verdict == "refused":  # until something better is known
            self._say(verdict="passed")
        self._time()
        limits: dict[str, Any] = {"budget": policy.budget, "run_bits": policy.clear.run_bits}
        self.gate.ledger.append(self.entry, delta=policy.delta, **limits)

    def refused(self, reason: Reason, *details: str) -> Message:
        """Make an error in place of the reply.

        Args:
            reason: What the server is told.
            details: For the site's ledger alone.
        """
        reasons = (reason, *self.entry.reasons, *details)
        self._say(verdict="refused", reasons=reasons, sha256="", multiplier=None, bits=0, reply_form="")
        self._time()
        try:
            self.gate.ledger.append(self.entry)
        except Exception:  # noqa: BLE001 (a refusal leaves whatever becomes of the ledger)
            reason = Reason.LEDGER
        return refusal(self.message, reason)

    def _called(self, context: Context, call_next: ClientAppCallable) -> Message:
        began = self.gate.clock()
        try:
            return call_next(self.message, context)
        finally:
            self.inside = self.gate.clock() - began - self.checking

    def _check_model(self, observed: Observation, sent: SentArrays) -> None:
        """Check the model before the first step; a suspicious one ends the training where the policy refuses it.

        Raises:
            RefusedError: If the model is suspicious and the policy refuses such.
        """
        if self.policy.model_checks == "off":
            return
        began = self.gate.clock()
        records = self.message.content.config_records.values()
        config = {key: value for record in records for key, value in record.items()}
        suspicious = self.checks.examine(observed, sent, config)
        self._say(checks=tuple(f"{finding.check}: {finding.about}" for finding in suspicious))
        if suspicious and self.policy.model_checks == "refuse":
            self.stop = Reason.MODEL
            raise RefusedError(self.stop)
        self.checking = self.gate.clock() - began

    def _see(self, observed: Observation) -> None:
        if observed.rows:
            self._say(pictures=observed.pictures, steps=observed.steps)
        bound = self.policy.bounds.get("learning-rate")
        if bound is not None and not all(is_within(rate, bound) for rate in observed.learning_rates):
            raise RefusedError(Reason.RATE)

    def _judge(self, reply: Message, reading: ReplyReading, observed: Observation) -> None:
        """Leave the reply as it is, or put defended arrays into it.

        Raises:
            RefusedError: If neither may leave.
        """
        self._require_form(reading)
        results = try_reading(reading, observed, psnr=self.policy.psnr, search=self._search())
        answers = self._answers(reading, observed, results)
        answer: Answer = next((strict for strict in STRICTEST if strict in answers), "say")
        self._say(outcomes=results.outcomes, reasons=(*self.entry.reasons, *(answers.get(answer) or ())))
        if answer == "refuse":
            first, *further = answers["refuse"]
            self._say(reasons=tuple(further))
            raise RefusedError(first)
        if answer == "defend" or self.policy.defend == "always":
            self._defend(reply, reading.only_update(), observed)

    def _require_form(self, reading: ReplyReading) -> None:
        """Note what nobody can judge; it keeps the form that it had in the run's first round.

        Raises:
            RefusedError: If it has another one.
        """
        if not (size := reading.unjudged_bytes):
            return
        self._say(not_judged=size, form=reading.form)
        if self.gate.ledger.first_form(self.entry.run) not in (None, reading.form):
            raise RefusedError(Reason.FORM)

    def _search(self) -> tuple[str, Any] | None:
        search = self.policy.search
        return (search.attack, search.options) if search.every and secrets.randbelow(search.every) == 0 else None

    def _answers(
        self, reading: ReplyReading, observed: Observation, results: AttackResults
    ) -> dict[Answer, list[Reason]]:
        """Collect the policy's answers and their reasons."""
        reasons: list[tuple[Answer, Reason]] = []
        if not observed.rows:
            reasons.append((self.policy.unseen, Reason.UNSEEN))
        if reading.unjudged_bytes:
            reasons.append((self.policy.unjudged, Reason.UNJUDGED))
        counts = [count for count in (observed.pictures, reading.examples) if count]
        if counts and min(counts) < self.policy.fewest_pictures:
            reasons.append((self.policy.pictures, Reason.FEW))
        reasons += [(getattr(self.policy, kind), reason) for kind, reason in KINDS.items() if results.came_back(kind)]
        if self.policy.defend == "always":  # what comes back counts once the update is defended
            reasons = [(answer if reason in UNKNOWN else "defend", reason) for answer, reason in reasons]
        answers: dict[Answer, list[Reason]] = {}
        for answer, reason in reasons:
            answers.setdefault(answer, []).append(reason)
        return answers

    def _defend(self, reply: Message, update: Update, observed: Observation) -> None:
        protected = self.policy.pipeline.protect(update.change, update.client, randomness=self.gate.randomness)
        record = update.record(protected)
        tensors = dict(record.to_torch_state_dict())
        results = try_upload(replace(update, tensors=tensors), observed, psnr=self.policy.psnr, search=AFTER)
        self._say(outcomes=results.outcomes)
        answers = {kind: getattr(self.policy, kind) for kind in KINDS if results.came_back(kind)}
        if "refuse" in answers.values() or answers.get("pictures") == "defend":
            raise RefusedError(Reason.DEFENCE)
        reply.content[update.key] = record
        self._say(verdict="defended", multiplier=self.policy.multiplier, leaves=list_leaving(reply.content))

    def _count_bits(self, rebuilt: Rebuilt) -> None:
        """Count what leaves in clear.

        Raises:
            RefusedError: If it is more than a reply may hold.
        """
        if rebuilt.count_bits("") > self.policy.clear.reply_bits:
            raise RefusedError(Reason.REPLY_BITS)
        last_form = find_last_form(self.gate.ledger.entries(), self.entry) if self.gate.ledger.path.exists() else ""
        self._say(bits=rebuilt.count_bits(last_form), reply_form=rebuilt.form_digest)

    def _say(self, **values: Any) -> None:
        self.entry = self.entry.model_copy(update=values)

    def _time(self) -> None:
        self._say(seconds=round(self.gate.clock() - self.started - self.inside, 3))
