"""The gate at the site: a real SuperNode against a bundle that fights it, and canaries for Flower's private names."""

import hashlib
import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.clients.gate.ledger import GateLedger

PROJECT = """
[project]
name = "fights"
version = "0.1.0"
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "clients.server:app"
clientapp = "clients.app:app"
[tool.flwr.app.config]
output = ""
"""
SERVER = """
import json, time
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from clients.model import net
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    got = []
    for turn in ("honest", "one", "pushes"):
        content = RecordDict({"arrays": ArrayRecord(net().state_dict()), "config": ConfigRecord({"turn": turn})})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=nodes[0], message_type="train", group_id=turn)])
        got.append(reply.error.reason if reply.has_error() else sorted(reply.content))
    with open(context.run_config["output"], "w") as file:
        json.dump(got, file)
"""
MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), nn.ReLU(), nn.Linear(16, 10))
"""
CLIENT = """
import flwr.supernode.runtime.run_clientapp as runtime
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from clients.model import net
app = ClientApp()
honest_push = runtime.push_message

@app.train()
def train(message, context):
    turn = message.content["config"]["turn"]
    model = net().train()
    images = torch.rand(1 if turn == "one" else 8, 3, 8, 8)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(model(images), torch.arange(len(images))).backward()
    optimiser.step()

    def push(client, reply, context):
        reply.content["arrays"] = ArrayRecord({k: v + images.mean() for k, v in model.state_dict().items()})
        return honest_push(client, reply, context)

    if turn == "pushes":
        runtime.push_message = push
    metrics = MetricRecord({"num-examples": len(images)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
"""


@pytest.mark.slow
def test_a_gated_supernode_lets_out_what_both_gates_passed_and_nothing_else(tmp_path: Path) -> None:
    app, site, output = tmp_path / "app", tmp_path / "site", tmp_path / "got.json"
    (app / "clients").mkdir(parents=True)
    site.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    sources = {"__init__": "", "server": SERVER, "app": CLIENT, "model": MODEL}
    for name, source in sources.items():
        (app / "clients" / f"{name}.py").write_text(source)
    (site / "policy.yaml").write_text("ledger: gate.jsonl\n")
    (tmp_path / "run.toml").write_text(f'output = "{output}"\n')
    with PrivateSuperLink(simulation=False) as superlink:
        gated = [sys.executable, "-P", "-m", "fedmjp", "supernode", "--policy", str(site / "policy.yaml"), "--"]
        superlink.start_node(*gated, number=0, log=tmp_path / "node.log")
        run = superlink.submit(app, tmp_path / "run.toml")
        log = list(superlink.log(run))
        assert superlink.status(run) == "finished:completed", "\n".join(log)
    said = "the site's upload gate: "
    assert json.loads(output.read_text()) == [
        ["arrays", "metrics"],
        f"{said}too few pictures behind the upload",
        f"{said}the reply did not pass the gate beside the app",
    ]
    entries = GateLedger(site / "gate.jsonl").entries()
    accepted, *messages = entries
    assert accepted.policy == hashlib.sha256((site / "policy.yaml").read_bytes()).hexdigest()
    verdicts = [(entry.round, entry.place, entry.verdict) for entry in messages]
    assert verdicts == [
        ("honest", "app", "passed"),
        ("honest", "node", "passed"),
        ("one", "app", "refused"),
        ("one", "node", "refused"),
        ("pushes", "app", "passed"),
        ("pushes", "node", "refused"),
    ]


# Canaries: what ``fedmjp.clients.gate.flower`` takes for granted of Flower.


def test_the_supernodes_loop_calls_what_the_gate_replaces_by_name_and_keyword() -> None:
    loop = inspect.getsource(start_client_internal.start_client_internal)
    for call in ("run_id = _pull_and_store_message(\n", "_push_messages(\n", "receive=receive,", "get_fab=get_fab,"):
        assert call in loop
    assert "confirm_message_received=confirm_message_received," in loop
    pulled = inspect.signature(start_client_internal._pull_and_store_message).parameters
    assert {"receive", "get_fab", "pull_object", "confirm_message_received", "object_store", "state"} <= set(pulled)
    pushed = inspect.signature(start_client_internal._push_messages).parameters
    assert set(pushed) == {"state", "object_store", "send", "push_object"}
    source = inspect.getsource(start_client_internal._push_messages)
    assert "send(message, object_tree, clientapp_runtime)" in source
    inserted = inspect.signature(start_client_internal._insert_message).parameters
    assert list(inserted) == ["msg", "state", "store"]


def test_a_message_is_confirmed_only_when_all_of_it_is_there() -> None:
    source = inspect.getsource(start_client_internal._pull_and_store_message)
    places = [source.index(part) for part in ("fab = get_fab(", "object_store.put(", "confirm_message_received(run_id")]
    assert places == sorted(places)


def test_the_process_of_a_bundle_loads_its_app_by_the_name_that_the_gate_replaces() -> None:
    source = inspect.getsource(run_clientapp.run_clientapp)
    assert "load_client_app_fn = get_load_client_app_fn(" in source
    assert "reply_message = client_app(message=message, context=context)" in source


def test_a_message_comes_out_of_the_contents_of_its_objects_with_the_same_hash() -> None:
    record = ArrayRecord({"w": torch.ones(3)})
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    message = Message(RecordDict({"a": record, "m": MetricRecord({"x": 1})}), dst_node_id=1, message_type="train")
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    assert get_object_tree(message).object_id == message.object_id
    again = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(again, Message)
    assert again.content.object_id == message.content.object_id
