"""Which replies the server refuses, and what it says of them."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedmjp.server.screening import refusal
from fedmjp.wire import ARRAYS, BUFFERS, METRICS, REPORTED

SENT = {
    ARRAYS: ArrayRecord({"w": torch.zeros(2, 3), "b": torch.zeros(3)}),
    BUFFERS: ArrayRecord({"count": torch.tensor(0)}),
}
GOOD_METRICS: dict[str, Any] = dict.fromkeys(REPORTED, 1)


@pytest.fixture(autouse=True, scope="module")
def inside_a_run() -> None:
    """Flower makes messages only inside a run."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def reply(**changes: Any) -> Message:
    """A good reply, with records that are others; None leaves one out."""
    records = {
        ARRAYS: ArrayRecord({"w": torch.ones(2, 3), "b": torch.ones(3)}),
        BUFFERS: ArrayRecord({"count": torch.tensor(4)}),
        METRICS: MetricRecord(GOOD_METRICS),
        **changes,
    }
    question = Message(content=RecordDict(), message_type=MessageType.TRAIN, dst_node_id=1)
    question.metadata.__dict__["_message_id"] = "question"
    return Message(RecordDict({key: value for key, value in records.items() if value is not None}), reply_to=question)


def arrays(**changes: Any) -> ArrayRecord:
    return ArrayRecord({"w": torch.ones(2, 3), "b": torch.ones(3), **changes})


def lying() -> ArrayRecord:
    """States another shape than its bytes have."""
    record = arrays()
    honest = Array(np.ones(7, dtype=np.float32))
    record["b"] = Array("float32", (3,), honest.stype, honest.data)
    return record


def packed(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    """States what the model has, and has other bytes."""
    record = arrays()
    record["b"] = Array("float32", (3,), stype, data)
    return record


def archive() -> bytes:
    """What NumPy reads as several arrays."""
    stream = io.BytesIO()
    np.savez(stream, b=np.ones(3, dtype=np.float32))
    return stream.getvalue()


def promising(shape: str) -> bytes:
    """An array's header that promises a shape, and three values."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12)


def metrics(**changes: Any) -> MetricRecord:
    return MetricRecord({**GOOD_METRICS, **{key.replace("_", "-"): value for key, value in changes.items()}})


def test_a_good_reply_is_not_refused() -> None:
    assert refusal(reply(), SENT) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({ARRAYS: arrays(b=torch.tensor([1.0, float("nan"), 1.0]))}, "tensor 'b' holds NaN or infinite values"),
        ({ARRAYS: arrays(b=torch.tensor([1.0, float("inf"), 1.0]))}, "tensor 'b' holds NaN or infinite values"),
        ({ARRAYS: arrays(w=torch.ones(3, 2))}, "tensor 'w' has shape (3, 2), the model's has (2, 3)"),
        ({ARRAYS: arrays(w=torch.ones(2, 3).double())}, "tensor 'w' holds float64, the model's holds float32"),
        ({ARRAYS: ArrayRecord({"w": torch.ones(2, 3)})}, "sent no tensor 'b'"),
        ({ARRAYS: arrays(more=torch.ones(1))}, "sent a tensor that nobody asked for: 'more'"),
        ({ARRAYS: lying()}, "tensor 'b' holds float32 (7,), not what it states"),
        ({ARRAYS: packed(b"nonsense")}, "tensor 'b' cannot be read"),
        ({ARRAYS: packed(b"")}, "tensor 'b' cannot be read"),
        ({ARRAYS: packed(b"PK\x03\x04 no archive")}, "tensor 'b' cannot be read"),
        ({ARRAYS: packed(archive())}, "tensor 'b' holds no single array"),
        ({ARRAYS: packed(promising(f"({2**61},)"))}, "tensor 'b' cannot be read"),
        ({ARRAYS: packed(promising("(" * 3000))}, "tensor 'b' cannot be read"),
        ({ARRAYS: packed(promising("-" * 5000 + "1"))}, "tensor 'b' "),
        ({ARRAYS: packed(pickle.dumps([1.0]))}, "tensor 'b' cannot be read"),
        ({ARRAYS: packed(bytes(100_000))}, "tensor 'b' has 100000 bytes, the model's has 140"),
        ({ARRAYS: packed(b"", stype="other")}, "tensor 'b' is packed as 'other', the model's as 'numpy.ndarray'"),
        ({ARRAYS: ArrayRecord({"\n" * 1000: torch.ones(1)})}, "sent no tensor"),
        ({ARRAYS: arrays(**{"\x1b[2J" * 1000: torch.ones(1)})}, " ..."),
        ({BUFFERS: None}, "sent the records 'arrays', 'metrics' instead of 'arrays', 'buffers', 'metrics'"),
        ({"more": arrays()}, "sent the records 'arrays', 'buffers', 'metrics' and 1 more instead of"),
        ({"more": ConfigRecord()}, "and 1 more instead of"),
        ({METRICS: None}, "sent the records 'arrays', 'buffers' instead of"),
        ({METRICS: MetricRecord({"num-examples": 1})}, "reported 'num-examples' instead of"),
        ({METRICS: metrics(num_examples=0)}, "reported num-examples = 0"),
        ({METRICS: metrics(num_examples=-3)}, "reported num-examples = -3"),
        ({METRICS: metrics(num_examples=[1, 2])}, "reported num-examples = [1, 2]"),
        ({METRICS: metrics(num_examples=float("inf"))}, "reported num-examples = inf"),
        ({METRICS: metrics(num_examples=float("nan"))}, "reported num-examples = nan"),
        (
            {METRICS: metrics(num_examples=1e308)},
            "reported num-examples = 1e+308, not a whole number from 1 to 2147483648",
        ),
        ({METRICS: metrics(num_examples=2.5)}, "reported num-examples = 2.5"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    found = refusal(reply(**changes), SENT)
    assert found is not None
    assert reason in found
    assert found.isprintable()
    assert len(found) < 600


def test_a_client_has_no_more_pictures_than_it_was_dealt() -> None:
    assert refusal(reply(metrics=metrics(num_examples=9)), SENT, most=9) is None
    assert refusal(reply(metrics=metrics(num_examples=10)), SENT, most=9) is not None


def test_what_only_the_history_shows_refuses_nobody() -> None:
    assert refusal(reply(metrics=metrics(loss=float("nan"), seconds=[1.0], learning_rate=1e308)), SENT) is None


def test_of_a_traceback_only_the_error_is_told() -> None:
    question = Message(content=RecordDict(), message_type=MessageType.TRAIN, dst_node_id=1)
    question.metadata.__dict__["_message_id"] = "question"
    reason = 'Traceback (most recent call last):\n  File "/home/somebody/x.py"\nValueError: no picture\n'
    assert refusal(Message(Error(code=2, reason=reason), reply_to=question), SENT) == "ValueError: no picture"
