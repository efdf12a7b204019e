"""How often the audit calls an app leaking that is protected: local_dp at epsilon 1, and secure sums.

``python results/audits/false_alarms.py``. Every run has made-up clients of its own: a small network of two linear
layers, trained for one step on eight drawn records each, over two rounds, with what hooks and the server would have
kept of it. It is judged as an app's run is, and 20 runs of each protection are counted. Beside them stands the same run
without a protection, so that an audit that never speaks is seen.
"""

import base64
import copy
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from fedmjp.benchmarks.audit.audit import examine
from fedmjp.benchmarks.audit.probe import watching
from fedmjp.benchmarks.audit.running import AppRun, Records
from fedmjp.benchmarks.audit.verdict import answers, exit_code
from fedmjp.defences.base import Client
from fedmjp.defences.local_dp import LocalDp
from fedmjp.randomness import SeededRandomness
from fedmjp.running import run_function
from fedmjp.seeds import torch_generator

CLIENTS, RECORDS, WIDTH, CLASSES = 3, 8, 64, 4
MODULUS, SCALE, OFFSET = 2**32, 2**20, 2**3  # of masked integers: weights lie between minus and plus the offset
LOCAL_DP = {"clipping_norm": 1.0, "epsilon": 1.0}
State = dict[str, Tensor]


def main(runs: Annotated[int, typer.Option(help="Runs of each protection.", min=1)] = 20) -> None:
    """Judge runs of each protection, and count those that are called leaking."""
    watching.watch_torch()
    rows = [judge(protection, seed) for protection in ("none", "local_dp", "secure sum") for seed in range(runs)]
    groups = pd.DataFrame(rows).groupby("protection", sort=False)
    table = groups.sum(numeric_only=True)
    table.insert(0, "runs", groups.size())
    typer.echo(table.to_markdown())


def judge(protection: str, seed: int) -> dict[str, Any]:
    """Audit a run, and tell whether it is called leaking, and which of the three questions is answered by yes."""
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(folder))
        play(records, protection, seed)
        report = examine("made up", records, AppRun(CLIENTS, 1.0, None), stand_in=False).report
    said = [entry.answer == "Yes" for entry in answers(report)]
    named = dict(zip(("labels", "membership", "records"), said, strict=True))
    return {"protection": protection, "leaks": exit_code(report) == 1, **named}


def play(records: Records, protection: str, seed: int) -> None:
    """Write down two rounds of all clients as the audit's hooks do."""
    generator = torch_generator(seed, "false alarms", protection)
    for path in (records.server, records.evaluator):
        path.mkdir(parents=True)
    if protection == "local_dp":
        line = {"mod": "local_dp", "defences": [{"name": "local_dp", **LOCAL_DP}]}
        (records.evaluator / "mods.jsonl").write_text(json.dumps(line) + "\n")
    module = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
    data = [draw(RECORDS, generator) for _ in range(CLIENTS)]
    for number in (1, 2):
        sent = {name: value.clone() for name, value in module.state_dict().items()}
        save(records.server / f"sent-{number}.npz", sent)
        trained = [train(records, module, f"{number}-{node}", node, data[node], generator) for node in range(CLIENTS)]
        draws = [SeededRandomness(seed).of(protection, number, node) for node in range(CLIENTS)]
        left = [defend(protection, sent, *pair) for pair in zip(trained, draws, strict=True)]
        masks = torch.randint(MODULUS, (CLIENTS, sum(value.numel() for value in sent.values())), generator=generator)
        masks[-1] = (MODULUS - masks[:-1].sum(0)) % MODULUS
        for node, state in enumerate(left):
            described = describe_arrays(state) if protection != "secure sum" else describe_masked(state, masks[node])
            file = f"left-{number}-{node}.npz"
            save(records.server / file, state if protection != "secure sum" else {})
            about = {"type": "train", "node": node, "round": number}
            down = {**about, "way": "down", "id": f"{number}-{node}", "file": f"sent-{number}.npz"}
            up = {**about, "way": "up", "id": f"r{number}-{node}", "reply_to": down["id"], "file": file}
            note(records, {**down, "records": describe_arrays(sent)}, {**up, "records": described})
        module.load_state_dict({name: sum(state[name] for state in left) / CLIENTS for name in sent})


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw records and their classes."""
    return torch.randn(count, WIDTH, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def train(
    records: Records,
    module: nn.Module,
    message: str,
    node: int,
    data: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> State:
    """Train a copy for one step under the audit's hooks, and evaluate it on records that nobody trains with."""
    trained, content = copy.deepcopy(module).train(), RecordDict({"arrays": ArrayRecord(module.state_dict())})
    about: Any = SimpleNamespace(metadata=SimpleNamespace(message_id=message, dst_node_id=node), content=content)
    with watching.MessageWatch(records.evaluator, records.model, about) as watch:
        optimiser = torch.optim.SGD(trained.parameters(), 0.1)
        torch.autograd.backward(F.cross_entropy(trained(data[0]), data[1]))
        optimiser.step()
        trained.eval()
        inputs, targets = draw(4 * RECORDS, generator)
        with torch.no_grad():
            F.cross_entropy(trained(inputs), targets)
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict())
    watch.keep(reply)
    return {name: value.detach().clone() for name, value in trained.state_dict().items()}


def defend(protection: str, sent: State, trained: State, randomness: SeededRandomness) -> State:
    """Return the weights that leave a client, in clear or under a mask."""
    if protection != "local_dp":
        return trained
    update = {name: trained[name] - sent[name] for name in sent}
    protected = LocalDp(LOCAL_DP).protect(update, Client("delta"), randomness=randomness)
    return {name: sent[name] + change for name, change in protected.items()}


def describe_masked(state: State, mask: Tensor) -> dict[str, Any]:
    """Describe an answer that holds weights as integers, each with a mask added to it."""
    flat = torch.cat([value.flatten() for value in state.values()]).double()
    integers = ((flat + OFFSET) * SCALE).round().long()
    np.save(content := io.BytesIO(), ((integers + mask) % MODULUS).numpy())
    encoded = {"bytes": base64.b64encode(content.getvalue()).decode()}
    return {"configs": {"kind": "config", "values": {"masked_params": [encoded]}}}


def describe_arrays(state: State) -> dict[str, Any]:
    """Describe a record of arrays as it is written down."""
    entries = {name: ["float32", list(value.shape), value.numel() * 4] for name, value in state.items()}
    return {"arrays": {"kind": "arrays", "entries": entries}}


def save(path: Path, state: State) -> None:
    """Write arrays as the server's half keeps them."""
    arrays: dict[str, Any] = {f"arrays/{name}": value.numpy() for name, value in state.items()}
    np.savez(path, **arrays)


def note(records: Records, *messages: Mapping[str, Any]) -> None:
    """Append messages to what crossed the wire."""
    with (records.server / "wire.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(message) + "\n" for message in messages)


if __name__ == "__main__":
    run_function(main)
