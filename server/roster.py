"""Which node is which client: Flower's node numbers are new in every run."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from fedmjp.errors import Failure, FederationError, QuorumError
from fedmjp.server.screening import last_line

POLL_SECONDS = 1.0


@dataclass
class Roster:
    """Knows every node by its key; without keys, as in a simulation, asks each for its client number until it has one.

    A node with another key is left out, and so is one whose answer is no client number of its own: who had a number
    first keeps it.
    """

    grid: Grid
    clients: int  # that a run waits for before it starts
    keys: Sequence[str] = ()  # of the nodes in the order of clients, as ``key_of`` gives them
    _nodes: dict[int, int] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def wait(self, patience: float, fewest: int | None = None) -> None:
        """Wait until all clients are there and have been asked: a slow start is no empty round.

        Args:
            patience: Seconds to wait for them, and for their answers.
            fewest: So many are enough when those seconds are over: the others may come late. None needs all.

        Raises:
            FederationError: If no client can say which one it is; QuorumError if they do not come, or none answers.
        """
        deadline, former = time.monotonic() + patience, -1
        while (present := len(list(self.grid.get_node_ids()))) < self.clients:
            if present != former:
                log(INFO, "%s of %s clients are there", present, self.clients)
            former = present
            if time.monotonic() > deadline:
                if present >= (self.clients if fewest is None else fewest):
                    break
                raise QuorumError(f"{present} of {self.clients} clients came within {patience:g} seconds")
            time.sleep(POLL_SECONDS)
        self._nodes, reasons = self._ask(patience)
        if reasons and not self._nodes:
            raise FederationError(f"no client can answer: {reasons[0]}")
        if not self._nodes:
            raise QuorumError(f"none of {self.clients} clients answered within {patience:g} seconds")

    def nodes(self, patience: float) -> tuple[dict[int, int], list[str]]:
        """Map the clients that are there now to their nodes; say once per node why it is left out.

        Args:
            patience: Seconds to wait for answers.
        """
        self._nodes, reasons = self._ask(patience)
        new = [reason for reason in dict.fromkeys(reasons) if reason not in self._told]
        self._told.update(new)
        return self._nodes, new

    def _by_key(self) -> tuple[dict[int, int], list[str]]:
        """Map clients to the nodes that have a key of the run, whatever number these claim."""
        client_of = {key: client for client, key in enumerate(self.keys)}
        nodes, reasons = {}, []
        for node in sorted(self.grid.get_nodes(), key=lambda node: node.node_id):
            client = client_of.get(key_of(node.public_key))
            if client is None:
                reasons.append(f"node {node.node_id} has a key that is none of this run's sites")
            else:
                nodes[client] = int(node.node_id)
        return nodes, reasons

    def _ask(self, patience: float) -> tuple[dict[int, int], list[str]]:
        """Ask those that are not known: new ones, and ones that could not answer before."""
        if self.keys:
            return self._by_key()
        present = set(self.grid.get_node_ids())
        nodes = {client: node for client, node in self._nodes.items() if node in present}
        messages = [
            Message(content=RecordDict({"config": ConfigRecord()}), message_type=MessageType.QUERY, dst_node_id=node)
            for node in sorted(present.difference(nodes.values()))
        ]
        replies = list(self.grid.send_and_receive(messages, timeout=patience)) if messages else []
        reasons = []
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            node, answer = reply.metadata.src_node_id, _answer(reply)
            if isinstance(answer, Failure):
                reasons.append(answer.reason)
            elif not 0 <= answer < self.clients:
                reasons.append(f"node {node} has partition-id {answer}; there are 0 to {self.clients - 1}")
            elif answer in nodes:
                reasons.append(f"node {node} has partition-id {answer} like node {nodes[answer]}; give it its own")
            else:
                nodes[answer] = node
        return nodes, reasons


def key_of(public: bytes) -> str:
    """Compute the digest that stands for a node's public key in a run's configuration.

    Args:
        public: The key as Flower keeps it.
    """
    return hashlib.sha256(public).hexdigest()


def _answer(reply: Message) -> int | Failure:
    """Read the client number that a node reports."""
    if reply.has_error():
        return Failure(last_line(reply.error.reason or ""))
    reported = reply.content.config_records.get("config", ConfigRecord()).get("partition-id")
    if isinstance(reported, int) and not isinstance(reported, bool):
        return reported
    reason = f"node {reply.metadata.src_node_id} has partition-id {reported!r}, which is no whole number"
    return Failure(last_line(reason))
