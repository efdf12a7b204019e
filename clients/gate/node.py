"""The gate in the SuperNode: what a bundle's own code cannot leave out, since it runs in another process.

It sees messages alone. A reply leaves if the gate beside the app let exactly this content pass, as the ledger says, and
if nothing in the tensors themselves gives a picture away. Everything is sent anew from what was judged.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from fedmjp.clients.gate import flower
from fedmjp.clients.gate.clear import find_bounds_refusal, find_clear_refusal
from fedmjp.clients.gate.ledger import Entry, GateLedger, Outcome
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.reading import ReplyReading, read_reply
from fedmjp.clients.gate.reasons import Reason, RefusedError, read_reason, refusal
from fedmjp.clients.gate.rebuilding import Rebuilder, Rebuilt
from fedmjp.clients.gate.self_attack import try_tensors
from fedmjp.clients.replies import SentArrays
from fedmjp.errors import DefenceError


class _UnlistedBundleError(Exception):
    """A bundle is not on the site's list."""


class NodeGate:
    """Judges what passes through a SuperNode.

    Args:
        policy: Of the site.
        ledger: That the gate beside the app writes, too.
    """

    def __init__(self, policy: Policy, ledger: GateLedger) -> None:
        self.policy, self.ledger = policy, ledger
        self._arrived: dict[str, Message] = {}  # messages that wait for their replies, by identifier
        self._forms: dict[tuple[int, str], str] = {}  # of the last replies, by run and kind
        self._first_forms: dict[int, str] = {}  # of arrays that were not judged, by run
        self._bits = Counter[int]()  # in clear, by run

    def install(self) -> None:
        """Have this process's SuperNode use the gate."""
        flower.replace_supernode_functions(self.pull, self.push)

    def pull(self, original: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message as Flower does, and keep what the server sent; a bundle that is not listed is not run.

        Args:
            original: Flower's function.
            named: Its arguments.
        """
        arrived: list[tuple[Message, Any]] = []
        contents: dict[str, bytes] = {}
        receive, get_fab, pull_object, confirm = (
            named[name] for name in ("receive", "get_fab", "pull_object", "confirm_message_received")
        )

        def received() -> Any:
            got = receive()
            if got is not None:
                arrived.append(got)
            return got

        def listed(*values: Any) -> Any:
            bundle = get_fab(*values)
            if self.policy.bundles and hashlib.sha256(bundle.content).hexdigest() not in self.policy.bundles:
                raise _UnlistedBundleError
            return bundle

        def kept(run: int, object_id: str) -> bytes:
            content: bytes = pull_object(run, object_id)
            contents[object_id] = content
            return content

        def confirmed(run: int, message_id: str) -> None:
            # Everything is there, and nothing of it was taken away yet.
            whole = flower.inflate(message_id, arrived[0][1], contents, named["object_store"])
            self._arrived = {message_id: whole}  # the SuperNode works on one at a time
            confirm(run, message_id)

        changed = {
            "receive": received, "get_fab": listed, "pull_object": kept, "confirm_message_received": confirmed
        }  # fmt: skip
        try:
            return original(**{**named, **changed})
        except _UnlistedBundleError:
            message = arrived[0][0]
            self._arrived = {message.metadata.message_id: message}
            reply = refusal(message, Reason.BUNDLE)
            flower.store_reply(reply, state=named["state"], object_store=named["object_store"])
            return message.metadata.run_id

    def push(self, original: Callable[..., None], **named: Any) -> None:
        """Push replies as Flower does, each judged and made anew.

        Args:
            original: Flower's function.
            named: Its arguments.
        """
        send, push_object, object_store = (named[name] for name in ("send", "push_object", "object_store"))

        def gated(message: Message, tree: Any, runtime: float) -> flower.PushAnswer:
            leaving = self._judged(message, tree, object_store)
            return flower.send_whole(leaving, send, push_object, float(round(runtime)))

        original(**{**named, "send": gated})

    def _judged(self, message: Message, tree: Any, object_store: Any) -> Message:
        """Make a reply anew, or an error in its place.

        Raises:
            LostReplyError: If nobody knows what it replies to.
        """
        began = time.perf_counter()
        message_sent = self._arrived.pop(message.metadata.reply_to_message_id, None)
        if message_sent is None:
            raise flower.LostReplyError  # Flower tells its log, and sends nothing
        outcomes: tuple[Outcome, ...] = ()
        details: tuple[str, ...] = ()
        rebuilt, reason = None, None
        try:
            reply = flower.await_reply(message.metadata.message_id, tree, object_store)
            if reply.has_error():
                raise RefusedError(read_reason(reply.error) or Reason.ANSWERED)
            outcomes, rebuilt = self._require_allowed(message_sent, reply)
        except RefusedError as error:
            reason = error.reason
        except DefenceError as error:
            reason, details = Reason.JUDGED, (str(error),)
        except Exception as error:  # noqa: BLE001 (whatever it is, the reply must not leave)
            reason, details = Reason.ERROR, (type(error).__name__,)
        try:
            self._note(message_sent, reason, details, outcomes, rebuilt, time.perf_counter() - began)
        except RefusedError as error:
            reason = error.reason
        except DefenceError:
            reason = Reason.LEDGER
        return (
            Message(rebuilt.content, reply_to=message_sent)
            if rebuilt is not None and reason is None
            else refusal(message_sent, reason or Reason.ERROR)
        )

    def _require_allowed(self, message: Message, reply: Message) -> tuple[tuple[Outcome, ...], Rebuilt]:
        """Attack the tensors of a reply, refuse it where the policy does, and build it anew.

        Returns:
            What the attacks found, and what leaves.

        Raises:
            RefusedError: If the reply may not leave.
        """
        if reason := find_bounds_refusal(message, self.policy.bounds):
            raise RefusedError(reason)
        if not self.ledger.approved(flower.hash_content(reply.content), message.metadata.run_id):
            raise RefusedError(Reason.UNGATED)
        training = message.metadata.message_type.split(".")[0] == "train"
        if reply.content.array_records and not training:
            raise RefusedError(Reason.ARRAYS)
        rebuilder = Rebuilder(message, self.policy)
        rebuilt = rebuilder.rebuild(reply.content)
        judged = Message(rebuilt.content, reply_to=message)
        reading = read_reply(judged, SentArrays(message), self.policy.kind, "gate") if training else None
        if reason := find_clear_refusal(rebuilt.content, self.policy.clear, reading):
            raise RefusedError(reason)
        if rebuilt.count_bits("") > self.policy.clear.reply_bits:
            raise RefusedError(Reason.REPLY_BITS)
        if reading is None:
            return (), rebuilt
        self._require_form(message.metadata.run_id, reading)
        results = try_tensors(reading)
        if self.policy.pictures != "say" and any(outcome.came_back for outcome in results.outcomes):
            raise RefusedError(Reason.FEW)
        if self.policy.rounds:
            rebuilt = rebuilder.rebuild(rebuilt.content, rounding=True)
        return results.outcomes, rebuilt

    def _require_form(self, run: int, reading: ReplyReading) -> None:
        """Hold arrays that nobody can judge against the policy, and against the form that the run's first had.

        Raises:
            RefusedError: If they may not leave, or have another form.
        """
        if not reading.unjudged_bytes:
            return
        if self.policy.unjudged == "refuse":
            raise RefusedError(Reason.UNJUDGED)
        if self._first_forms.setdefault(run, reading.form) != reading.form:
            raise RefusedError(Reason.FORM)

    def _note(
        self,
        message: Message,
        reason: Reason | None,
        details: tuple[str, ...],
        outcomes: tuple[Outcome, ...],
        rebuilt: Rebuilt | None,
        seconds: float,
    ) -> None:
        """Write a verdict to the disk.

        Raises:
            RefusedError: If the run's bits in clear do not allow the reply.
            DefenceError: If that fails.
        """
        metadata = message.metadata
        entry = Entry(
            place="node",
            run=metadata.run_id,
            node=metadata.dst_node_id,
            round=str(metadata.group_id),
            kind=metadata.message_type,
            verdict="refused" if reason else "passed",
            reasons=(reason, *details) if reason else (),
            outcomes=outcomes,
            seconds=round(seconds, 3),
        )
        if rebuilt is None or reason is not None:
            self.ledger.append(entry)
            return
        # In memory as well: the ledger is a file, which others may shorten.
        stream = entry.run, entry.kind
        entry = entry.model_copy(
            update={"reply_form": rebuilt.form_digest, "bits": rebuilt.count_bits(self._forms.get(stream, ""))}
        )
        limit = self.policy.clear.run_bits
        try:
            if self._bits[entry.run] + entry.bits > limit:
                raise RefusedError(Reason.RUN_BITS)
            self.ledger.append(entry, run_bits=limit)
        except RefusedError as error:
            self.ledger.append(entry.model_copy(update={"verdict": "refused", "reasons": (error.reason,), "bits": 0}))
            raise
        self._forms[stream] = entry.reply_form
        self._bits[entry.run] += entry.bits
