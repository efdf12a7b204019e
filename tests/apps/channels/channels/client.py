"""The app: an honest upload, changed by the way that the server names."""

import os
from pathlib import Path

import flwr.supernode.runtime.run_clientapp as runtime
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .model import PICTURES, trained
from .ways import SECRET, WAYS

app = ClientApp()


def honest_reply(message: Message) -> Message:
    state = trained(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"loss": 2.302, "num-examples": PICTURES})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    way = message.content["config"]["way"]
    reply = honest_reply(message)
    if message.content["config"]["forged"]:
        forge(message, WAYS[way])
        return reply
    return WAYS[way](reply)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 8, "loss": 0.123456789, "accuracy": 0.98765432})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@app.query()
def query(message: Message, context: Context) -> Message:
    return Message(RecordDict({"config": ConfigRecord({"partition-id": 3, "answer": SECRET})}), reply_to=message)


def forge(message: Message, way: object) -> None:
    """Fight the gate in this process: what is pushed is another reply, which the ledger is told to have passed."""
    push = runtime.push_message

    def push_changed(client: object, reply: Message, context: Context) -> object:
        from fedmjp.clients.gate.ledger import Entry, GateLedger
        from fedmjp.clients.gate.policy import Policy

        changed = way(reply)
        policy = Path(os.environ["FEDMJP_GATE_POLICY"])
        digest = changed.content.object_id if changed.has_content() else ""
        entry = Entry(run=message.metadata.run_id, round="forged", kind="train", verdict="passed", sha256=digest)
        GateLedger(Policy.read(policy)[1]).append(entry)
        return push(client, changed, context)

    runtime.push_message = push_changed
