"""The three sentences that a board says to somebody who deploys a defence."""

import numpy as np
import pytest

from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.report.advice import write_advice
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.texts import markdown_text
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel
from tests.sample_board import sample_board, sample_entry

NOISY = ("mjp", "gaussian")
UNPROTECTED = ": mjp at mask ratio 0.27 on deit_tiny (untrained) does not protect pictures that are shown again."


def entry_of(threat: ThreatModel, values: list[float], **changes: object) -> BoardEntry:
    given = {
        "id": threat.digest() + str(changes), "model": "deit_tiny", "weights": "untrained", "defences": "mjp",
        "attack": "mjp_intersection", "role": "attack", "setting": Setting.C, "verdict": "leaks",
        "reason": "", "adapted": True, "threat": threat, "values": np.array(values),
    }  # fmt: skip
    return sample_entry(**given | changes)


@pytest.fixture
def entries() -> list[BoardEntry]:
    once, four = ThreatModel(), ThreatModel(uploads_per_picture=4)
    return [
        entry_of(once, [17.0, 18.0, 19.0, 30.0]),
        entry_of(once, [9.0, 10.0, 11.0, 12.0], attack="patch_embedding", adapted=False),
        entry_of(four, [20.0, 90.0, 95.0, 100.0]),
        entry_of(four, [15.0, 15.5, 16.0, 16.5], defences=NOISY),
        entry_of(four, [99.0] * 4, setting=Setting.B),
        entry_of(four, [99.0] * 4, defences="mjp:mask_ratio=0.5"),
    ]


def test_it_says_what_comes_back_once_and_again_and_what_else_was_measured(entries: list[BoardEntry]) -> None:
    once, again, instead = write_advice(sample_board(models=[], extra=entries))
    assert "mjp at mask ratio 0.27 on deit_tiny" in once
    assert "sees a picture once" in once
    assert "recovers 0 of 4 exactly" in once
    assert "18.5 dB in the median of 4 pictures" in once
    assert "do not know mjp recover 10.5 dB" in once
    assert "3 of 4 after 4 uploads" in again
    assert again.endswith(UNPROTECTED)
    assert "besides mjp, each" in instead
    assert "mjp + gaussian: 0 of 4 exactly, median 15.8 dB, from 4 uploads." in instead


def test_an_attack_that_ends_early_is_never_said_to_be_a_protection() -> None:
    few = [entry_of(ThreatModel(uploads_per_picture=count), [12.0, 13.0, 14.0]) for count in (1, 4)]
    once, again = write_advice(sample_board(models=[], extra=few))
    assert "recovers 0 of 3 exactly" in once
    assert again.endswith("0 of 3 after 4 uploads: where attacks end is no evidence of protection.")
    many = [entry_of(ThreatModel(uploads_per_picture=count), [52.0, 53.0, 54.0]) for count in (1, 4)]
    once, again = write_advice(sample_board(models=[], extra=many))
    assert "recovers 3 of 3 exactly" in once
    assert again.endswith(f"3 of 3 after 4 uploads{UNPROTECTED}")


def test_an_attack_below_the_guess_is_said_to_have_failed() -> None:
    four = ThreatModel(uploads_per_picture=4)
    guess = entry_of(four, [16.0, 17.0, 18.0], role="floor", attack="grey", id="guess", defences=NOISY)
    plain = [entry_of(ThreatModel(uploads_per_picture=count), [52.0, 53.0, 54.0]) for count in (1, 4)]

    def instead(values: list[float]) -> str:
        protected = entry_of(four, values, floor="guess", defences=NOISY)
        return write_advice(sample_board(models=[], extra=[*plain, guess, protected]))[2]

    assert "the attack failed, which proves nothing" in instead([9.0, 10.0, 11.0])
    assert "failed" not in instead([19.0, 20.0, 21.0])


def test_an_attack_that_makes_nothing_of_more_uploads_is_said_to_have_failed() -> None:
    counts = [ThreatModel(uploads_per_picture=count) for count in (1, 4)]
    plain = [entry_of(threat, [52.0, 53.0, 54.0]) for threat in counts]

    def instead(more: float) -> str:
        noisy = [
            entry_of(t, [18.0, 19.0 + gain, 20.0], defences=NOISY) for t, gain in zip(counts, (0, more), strict=True)
        ]
        return write_advice(sample_board(models=[], extra=[*plain, *noisy]))[2]

    assert "the attack makes nothing of the others, which proves nothing" in instead(0)
    assert "makes nothing" not in instead(0.5)


def test_it_stands_at_the_top_of_the_page(entries: list[BoardEntry]) -> None:
    board = sample_board(models=[], extra=entries)
    text = markdown_text(Report(board))
    assert text.index("before a server that sees a picture once") < text.index("## Threat model")


def test_without_several_uploads_nothing_is_said(entries: list[BoardEntry]) -> None:
    assert write_advice(sample_board(models=[], extra=entries[:2])) == []
    assert write_advice(sample_board()) == []


def test_a_battery_that_tried_several_defences_speaks_of_none(entries: list[BoardEntry]) -> None:
    """None of them is what the board is about; of one defence its pipelines may be on the board."""
    board = sample_board(models=[], extra=entries)
    tried = board.model_copy(update={"about": {**board.about, "battery": "standard 8"}})
    assert write_advice(tried) == write_advice(board) != []
    others = [
        entry_of(ThreatModel(uploads_per_picture=count), [9.0, 9.5, 10.0], defences="gaussian") for count in (1, 4)
    ]
    both = sample_board(models=[], extra=[*entries, *others])
    assert write_advice(both) != []
    assert write_advice(both.model_copy(update={"about": {**both.about, "battery": "standard 8"}})) == []


def test_servers_that_change_weights_are_told_apart_from_honest_ones(entries: list[BoardEntry]) -> None:
    fishing = ThreatModel.parse({"batch_size": 8, "server": "class_fishing"})
    *_, instead = write_advice(sample_board(models=[], extra=[*entries, entry_of(fishing, [91.0, 92.0, 93.0, 94.0])]))
    assert "batches of 8, a server that changes weights (class_fishing): 4 of 4 exactly" in instead
