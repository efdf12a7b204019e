"""Ways to send a secret beside an honest upload: it is refused, or what leaves is the honest reply to the last bit."""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.clients.gate.ledger import Entry, GateLedger
from fedmjp.clients.gate.node import NodeGate
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.reasons import Reason
from fedmjp.clients.mods import UploadGate
from fedmjp.errors import ConfigError
from tests.apps.channels.channels.client import honest_reply
from tests.apps.channels.channels.model import net
from tests.apps.channels.channels.ways import SECRET, WAYS
from tests.conftest import ROOT
from tests.test_cli import BAD_INPUT, run
from tests.test_gate import context, message_of, reason_of

SAID = "the site's upload gate: "
# What leaves is the honest reply.
WRITTEN_ANEW = (
    "honest", "float64_for_float32", "byte_order", "fortran_order", "padding_of_a_header", "version_of_a_header",
    "a_comment_in_a_header", "keys_twice_in_a_header", "order_of_arrays", "order_of_records", "low_digits_of_a_metric",
    "order_of_metrics", "metadata", "many_at_once",
)  # fmt: skip
ZEROS = ("negative_zeros", "subnormal_numbers")  # what leaves is the reply with plain zeros
REFUSED = {
    "bytes_behind": Reason.UNREADABLE,
    "another_shape": Reason.LAYOUT,
    "a_larger_array": Reason.LAYOUT,
    "a_large_shape_with_few_values": Reason.UNREADABLE,
    "a_declared_shape_that_lies": Reason.UNREADABLE,
    "a_declared_type_that_lies": Reason.UNREADABLE,
    "a_serialisation_that_lies": Reason.UNREADABLE,
    "text_for_numbers": Reason.UNREADABLE,
    "records_for_numbers": Reason.UNREADABLE,
    "a_compressed_array": Reason.UNREADABLE,
    "an_archive_of_arrays": Reason.UNREADABLE,
    "an_empty_array_more": Reason.LAYOUT,
    "a_scalar_more": Reason.LAYOUT,
    "names_of_arrays": Reason.LAYOUT,
    "look_alike_names": Reason.LAYOUT,
    "case_of_names": Reason.LAYOUT,
    "names_of_records": Reason.NAMES,
    "case_of_records": Reason.LAYOUT,
    "arrays_in_a_second_record": Reason.LAYOUT,
    "bytes_in_a_setting": Reason.NAMES,
    "text_in_a_setting": Reason.NAMES,
    "settings_of_many_truths": Reason.NUMBERS,
    "names_of_metrics": Reason.NAMES,
    "a_list_of_metrics": Reason.REPLY_BITS,
    "a_large_count": Reason.NUMBERS,
    "text_of_an_error": Reason.ANSWERED,
}
# Of these other tests below say what the gate does.
VALUES = (
    "chunks_of_an_array", "low_bits_of_the_mantissa", "another_type", "truth_values", "payloads_of_nan",
    "some_arrays_alone", "plain_zeros", "payload_of_a_metric", "sign_of_a_metric",
)  # fmt: skip


DEFAULT = Policy()


def sent() -> Message:
    return message_of(RecordDict({"arrays": ArrayRecord(net().state_dict()), "config": ConfigRecord({"lr": 0.1})}))


def through_the_mod(way: str, folder: Path, policy: Policy = DEFAULT) -> Message:
    gate = UploadGate(policy, ledger=folder / "mod.jsonl")
    return gate(sent(), context(), lambda message, _: WAYS[way](honest_reply(message)))


def through_the_node(way: str, folder: Path, policy: Policy = DEFAULT) -> Message:
    """Send a reply that the gate beside the app never saw, though the ledger, which the app forged, says so."""
    message, ledger = sent(), GateLedger(folder / "node.jsonl")
    reply = WAYS[way](honest_reply(message))
    digest = reply.content.object_id if reply.has_content() else ""
    ledger.append(Entry(run=message.metadata.run_id, round="1", kind="train", verdict="passed", sha256=digest))
    gate = NodeGate(policy, ledger)
    gate._arrived = {message.metadata.message_id: message}
    reply.metadata.__dict__["_message_id"] = reply.object_id
    reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
    store = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    return gate._judged(reply, get_object_tree(reply), store)


PLACES = pytest.mark.parametrize("through", [through_the_mod, through_the_node])


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The identifier of the honest content, as Flower names it: a hash of everything in it."""
    app_reply = honest_reply(sent())
    reply = through_the_mod("honest", tmp_path_factory.mktemp("honest"))
    for name, array in app_reply.content["arrays"].items():
        assert np.array_equal(array.numpy(), reply.content["arrays"][name].numpy())
    return reply.content.object_id


def test_every_way_has_its_place() -> None:
    assert sorted(WAYS) == sorted([*WRITTEN_ANEW, *ZEROS, *REFUSED, *VALUES])


@PLACES
@pytest.mark.parametrize("way", WRITTEN_ANEW)
def test_what_leaves_is_the_honest_reply(way: str, through: Any, honest: str, tmp_path: Path) -> None:
    reply = through(way, tmp_path)
    assert not reply.has_error(), reply.error.reason
    assert reply.content.object_id == honest
    assert reply.metadata.group_id == "3"
    assert reply.metadata.message_type == "train"


@PLACES
@pytest.mark.parametrize("way", ZEROS)
def test_zeros_and_numbers_near_to_them_are_one_zero(way: str, through: Any, tmp_path: Path) -> None:
    replies = [through(name, tmp_path).content.object_id for name in (way, "plain_zeros")]
    assert replies[0] == replies[1]


@PLACES
@pytest.mark.parametrize(("way", "reason"), REFUSED.items())
def test_what_has_no_honest_form_is_refused_and_nothing_of_it_is_echoed(
    way: str, reason: Reason, through: Any, tmp_path: Path
) -> None:
    said = reason_of(through(way, tmp_path))
    assert said == SAID + reason
    written = "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))
    assert SECRET[:20].hex() not in written + said


def test_the_chunks_of_an_array_are_cut_anew(honest: str, tmp_path: Path) -> None:
    assert through_the_mod("chunks_of_an_array", tmp_path).content.object_id == honest
    # Its content is hashed by its chunks: what arrives is not what the ledger speaks of.
    assert reason_of(through_the_node("chunks_of_an_array", tmp_path)) == SAID + Reason.UNGATED


@PLACES
@pytest.mark.parametrize("way", ["another_type", "truth_values"])
def test_numbers_of_another_type_leave_in_the_type_that_came_in(way: str, through: Any, tmp_path: Path) -> None:
    policy = Policy(kind="weights")
    assert through(way, tmp_path, policy).content["arrays"]["1.weight"].dtype == "float32"


@PLACES
@pytest.mark.parametrize("kind", ["weights", "gradient"])
def test_rounding_closes_the_mantissa(kind: str, through: Any, tmp_path: Path) -> None:
    honest, secret = (
        through(way, tmp_path, Policy(kind=kind, rounding="grid", pictures="say")).content["arrays"]["1.weight"].numpy()
        for way in ("honest", "low_bits_of_the_mantissa")
    )
    base = net().state_dict()["1.weight"].numpy()
    change = honest if kind == "gradient" else honest - base
    assert np.mean(honest != secret) < 0.002  # but for values on the edge between two steps
    exact = honest_reply(sent()).content["arrays"]["1.weight"].numpy()
    exact_change = exact if kind == "gradient" else exact - base
    error = np.sqrt(np.mean((change - exact_change) ** 2) / np.mean(exact_change**2))
    assert error < 0.02
    steps = np.unique(np.round(change / (np.sqrt(np.mean(exact_change**2)) / 64)))
    assert len(steps) < 2**10


def test_the_bits_of_a_run_are_counted_and_end(tmp_path: Path) -> None:
    policy = Policy.parse({"clear": {"run_bits": 600}})
    reasons = []
    for _ in range(12):
        for through in (through_the_mod, through_the_node):
            reply = through("honest", tmp_path, policy)
            reasons.append(reply.error.reason if reply.has_error() else "")
    mod = GateLedger(tmp_path / "mod.jsonl").entries()
    assert mod[0].bits > mod[1].bits == mod[2].bits == 1 + 32 + 25
    assert sum(entry.bits for entry in mod) <= 600
    assert reasons[0] == reasons[1] == ""
    assert reasons[-2:] == [SAID + Reason.RUN_BITS] * 2


@PLACES
@pytest.mark.parametrize(("way", "written"), [("payload_of_a_metric", math.nan), ("sign_of_a_metric", 0.0)])
def test_a_metric_that_is_no_number_or_zero_has_one_form(
    way: str, written: float, through: Any, tmp_path: Path
) -> None:
    loss = through(way, tmp_path).content["metrics"]["loss"]
    assert struct.pack("<d", loss) == struct.pack("<d", written)


@PLACES
def test_numbers_that_are_none_do_not_leave(through: Any, tmp_path: Path) -> None:
    assert through("payloads_of_nan", tmp_path).has_error()


def test_a_policy_that_changed_is_not_in_force_before_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An app wrote it: the gate does not start, neither in the SuperNode nor beside the app."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("ledger: gate.jsonl\n")
    UploadGate(policy)
    UploadGate(policy)  # as after a restart
    policy.write_text("ledger: gate.jsonl\nclear: {names: [secret], bytes: 100000, reply_bits: 1000000}\n")
    assert run(monkeypatch, "supernode", "--policy", str(policy), "--", "--insecure") == BAD_INPUT
    printed = capsys.readouterr().err
    assert "is not what was accepted last" in " ".join(printed.split())
    assert printed.count("\n") == 1
    with pytest.raises(ConfigError, match="fedmjp gate accept --policy"):
        UploadGate(policy)
    assert run(monkeypatch, "gate", "accept", "--policy", str(policy)) == 0
    UploadGate(policy)


@pytest.mark.slow
def test_a_real_supernode_sends_what_it_understood(honest: str, tmp_path: Path) -> None:
    """The app forges the ledger and pushes past the gate in its process, but where it says that it does not."""
    asked: dict[str, str] = {
        "train:honest:": honest,
        "train:many_at_once:forged": honest,
        "train:bytes_behind:forged": Reason.UNREADABLE,
        "train:names_of_records:forged": Reason.NAMES,
        "train:bytes_in_a_setting:forged": Reason.NAMES,
        "query:honest:": Reason.NAMES,
        "evaluate:honest:": "",
    }
    site, output = tmp_path / "site", tmp_path / "got.json"
    site.mkdir()
    (site / "policy.yaml").write_text("ledger: gate.jsonl\n")
    (tmp_path / "run.toml").write_text(f'output = "{output}"\nways = "{",".join(asked)}"\n')
    with PrivateSuperLink(simulation=False) as superlink:
        gated = [sys.executable, "-P", "-m", "fedmjp", "supernode", "--policy", str(site / "policy.yaml"), "--"]
        superlink.start_node(*gated, number=0, log=tmp_path / "node.log")
        run = superlink.submit(ROOT / "tests" / "apps" / "channels", tmp_path / "run.toml")
        log = list(superlink.log(run))
        assert superlink.status(run) == "finished:completed", "\n".join(log)
    got = dict(zip(asked, json.loads(output.read_text()), strict=True))
    evaluated = got.pop("evaluate:honest:")
    assert evaluated["plain"] == {"metrics": {"accuracy": 0.9877, "loss": 0.1235, "num-examples": 8}}
    for words, reply in got.items():
        assert reply["content"] or reply["error"].removeprefix(SAID) == asked[words], words
        assert reply["metadata"][:2] == [words.split(":")[1], words.split(":")[0]]
    assert {words: reply["content"] for words, reply in got.items() if reply["content"]} == {
        words: honest for words in asked if asked[words] == honest
    }


def test_further_arrays_leave_where_the_policy_lists_them(tmp_path: Path) -> None:
    """Prototypes of classes have a shape of their own; an array that is not listed has none."""
    prototypes, policy = (
        {"mean": np.ones((2, 3), np.float64)},
        Policy.parse({"kind": "weights", "arrays": {"extra/mean": {"shape": [2, 3]}}}),
    )

    def reply_with(arrays: dict[str, np.ndarray]) -> Message:
        gate = UploadGate(policy, ledger=tmp_path / "gate.jsonl")

        def app(message: Message, _: Context) -> Message:
            reply = honest_reply(message)
            reply.content["extra"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
            return reply

        return gate(sent(), context(), app)

    assert reply_with(prototypes).content["extra"]["mean"].dtype == "float32"
    for arrays in ({"mean": np.ones((3, 2))}, prototypes | {"more": np.ones(1)}, {"mean": np.ones((2, 3, 1))}):
        assert reason_of(reply_with(arrays)) == SAID + Reason.LAYOUT
