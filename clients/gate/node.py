"""The gate in the SuperNode: what a bundle's own code cannot leave out, since it runs in another process.

It sees messages alone. A reply leaves if the gate beside the app let exactly this content pass, as the ledger says, and
if nothing in the tensors themselves gives a picture away. Everything is sent anew from what was judged.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Message

from fedmjp.clients.gate import flower
from fedmjp.clients.gate.clear import bounds_refusal, clear_refusal
from fedmjp.clients.gate.ledger import Entry, GateLedger, Outcome
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.reasons import Reason, RefusedError, known_reason, refusal
from fedmjp.clients.gate.trying import try_tensors
from fedmjp.clients.replies import Sent, read_update
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

    def install(self) -> None:
        """Have this process's SuperNode use the gate."""
        flower.replace_supernode_functions(self.pull, self.push)

    def pull(self, original: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message as Flower does, and keep what the server sent; a bundle that is not listed is not run."""
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
            whole = flower.inflated(message_id, arrived[0][1], contents, named["object_store"])
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
        """Push replies as Flower does, each judged and made anew."""
        send, push_object, object_store = (named[name] for name in ("send", "push_object", "object_store"))

        def gated(message: Message, tree: Any, runtime: float) -> flower.Sent:
            leaving = self._judged(message, tree, object_store)
            return flower.send_whole(leaving, send, push_object, runtime)

        original(**{**named, "send": gated})

    def _judged(self, message: Message, tree: Any, object_store: Any) -> Message:
        """The reply made anew, or an error in its place; LostReplyError if nobody knows what it replies to."""
        began = time.perf_counter()
        asked = self._arrived.pop(message.metadata.reply_to_message_id, None)
        if asked is None:
            raise flower.LostReplyError  # Flower tells its log, and sends nothing
        outcomes: tuple[Outcome, ...] = ()
        details: tuple[str, ...] = ()
        content, reason = None, None
        try:
            reply = flower.awaited_reply(message.metadata.message_id, tree, object_store)
            if reply.has_error():
                raise RefusedError(known_reason(reply.error) or Reason.ANSWERED)
            outcomes, content = self._require_allowed(asked, reply), reply.content
        except RefusedError as error:
            reason = error.reason
        except DefenceError as error:
            reason, details = Reason.JUDGED, (str(error),)
        except Exception as error:  # noqa: BLE001 (whatever it is, the reply must not leave)
            reason, details = Reason.ERROR, (type(error).__name__,)
        try:
            self._note(asked, reason, details, outcomes, time.perf_counter() - began)
        except DefenceError:
            reason = Reason.LEDGER
        return (
            Message(content, reply_to=asked)
            if content is not None and reason is None
            else refusal(asked, reason or Reason.ERROR)
        )

    def _require_allowed(self, asked: Message, reply: Message) -> tuple[Outcome, ...]:
        """What was tried; RefusedError if the reply may not leave."""
        if reason := bounds_refusal(asked, self.policy.bounds):
            raise RefusedError(reason)
        if not self.ledger.approved(flower.content_id(reply.content), asked.metadata.run_id):
            raise RefusedError(Reason.UNGATED)
        update = None
        if asked.metadata.message_type.split(".")[0] == "train":
            update = read_update(reply, Sent(asked), self.policy.kind, "gate")
        elif reply.content.array_records:
            raise RefusedError(Reason.ARRAYS)
        if reason := clear_refusal(reply.content, self.policy.clear, update):
            raise RefusedError(reason)
        if update is None:
            return ()
        tried = try_tensors(update)
        if self.policy.pictures != "say" and any(outcome.came_back for outcome in tried.outcomes):
            raise RefusedError(Reason.FEW)
        return tried.outcomes

    def _note(
        self,
        message: Message,
        reason: Reason | None,
        details: tuple[str, ...],
        outcomes: tuple[Outcome, ...],
        seconds: float,
    ) -> None:
        """Put a verdict on the disk; DefenceError if that fails."""
        said = message.metadata
        entry = Entry(
            place="node",
            run=said.run_id,
            round=str(said.group_id),
            kind=said.message_type,
            verdict="refused" if reason else "passed",
            reasons=(reason, *details) if reason else (),
            outcomes=outcomes,
            seconds=round(seconds, 3),
        )
        self.ledger.append(entry)
