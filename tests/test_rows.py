"""The paper's rows against the text of its tables, as printed."""

import csv
from pathlib import Path

import pytest

from fedmjp.config import ModelConfig
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.errors import UnknownNameError
from fedmjp.training.config import TrainingConfig
from fedmjp.training.rows import ROWS, reported, row

PRINTED = Path(__file__).parent / "golden" / "mjp_tables_1_3_4.csv"


def printed() -> dict[str, dict[str, str]]:
    lines = [line for line in PRINTED.read_text().splitlines() if not line.startswith("#")]
    return {line["row"]: line for line in csv.DictReader(lines)}


def test_there_is_every_printed_row_and_no_other():
    assert list(ROWS) == list(printed())


@pytest.mark.parametrize("name", list(printed()))
def test_figures_are_those_that_are_printed(name: str):
    line, found = printed()[name], row(name).reported
    assert float(line["top1"]) == found.top1
    assert (float(line["difference"]) if line["difference"] else None) == found.difference
    assert float(line["consistency"]) == found.consistency


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_can_be_trained_and_is_found_again(name: str):
    found = row(name)
    config = TrainingConfig.parse(found.values)
    recognised = reported(config.network, config.pipeline)
    assert recognised is not None
    assert (recognised.top1, recognised.consistency) == (found.reported.top1, found.reported.consistency)


def test_another_training_is_no_row():
    assert reported(ModelConfig(name="deit_micro"), read_pipeline([])) is None
    half, noisy = read_pipeline(["mjp:mask_ratio=0.5"]), read_pipeline(["mjp:mask_ratio=0.03", "gaussian"])
    for pipeline in (half, noisy):
        assert reported(pipeline.change_model(ModelConfig(name="deit_small")), pipeline) is None


def test_a_model_of_unknown_training_is_taken_for_the_papers_best():
    mjp = ModelConfig(name="deit_small", unknown_embedding=True, localisation="nonlinear")
    assert reported(mjp, None) == row("table1-deit_small-mjp").reported
    assert reported(ModelConfig(name="deit_small"), None) == row("table1-deit_small").reported


def test_the_picture_size_is_not_compared():
    small = ModelConfig(name="deit_small", image_size=64)
    assert reported(small, read_pipeline([])) == row("table1-deit_small").reported


def test_a_name_that_is_nearly_one():
    with pytest.raises(UnknownNameError, match=r"Unknown row 'table4-K'\. Did you mean table4-"):
        row("table4-K")
