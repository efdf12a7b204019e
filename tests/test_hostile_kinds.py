"""What the hostile clients of the study send."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedmjp.wire import ARRAYS, EXAMPLES, METRICS
from tests.studies import load_study

study = load_study("hostile_clients/study.py")
KINDS, LATE, Situation, update_of = study.KINDS, study.LATE, study.Situation, study.update_of

HONEST = np.random.default_rng(0).normal(size=(10, 5)).astype(np.float32)


def answer(update: np.ndarray) -> RecordDict:
    return RecordDict({ARRAYS: ArrayRecord({"w": torch.as_tensor(update)}), METRICS: MetricRecord({EXAMPLES: 7})})


SITUATION = Situation(2, lambda of: answer(HONEST[of]), lambda of: answer(HONEST[of] + 100), 10, answer(HONEST[2] + 50))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("scaling", HONEST[2] * 1e4),
        ("sign flip", HONEST[2] * -5),
        ("label flip", HONEST[2] + 100),
        ("little is enough", HONEST.mean(0) - 1.5 * HONEST.std(0, ddof=1)),
        ("NaN", HONEST[2] * np.nan),
        ("wrong counts", -HONEST[2]),
        ("replay", HONEST[2] + 50),
        (LATE, HONEST[2]),
        ("huge", HONEST[2] * 0 + np.float32(3e38)),
    ],
)
def test_a_hostile_client_sends_what_its_name_says(kind: str, expected: np.ndarray) -> None:
    sent = KINDS[kind](SITUATION)
    assert sent is not None
    assert np.allclose(update_of(sent)["w"].numpy(), expected, rtol=1e-5, equal_nan=True)
    assert int(sent[METRICS][EXAMPLES]) == (2**31 if kind == "wrong counts" else 7)  # type: ignore[index, arg-type, call-overload]


def test_all_ten_are_there_and_one_says_nothing() -> None:
    assert len(KINDS) == 10
    assert KINDS["silent"](SITUATION) is None
    assert int(SITUATION.own[METRICS][EXAMPLES]) == 7, "the honest answer is untouched"  # type: ignore[index, arg-type, call-overload]
