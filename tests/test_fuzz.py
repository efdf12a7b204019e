"""Files from anybody, damaged and malicious: nothing hangs, nothing but our own errors, no row is lost."""

import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.leaderboard.admission import SUBMITTED, admit, read_submitted
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.texts import csv_text, latex_text, markdown_text
from fedmjp.benchmarks.uploads.rounds import open_records
from fedmjp.data.selection import open_source, select_for
from fedmjp.errors import Failure, FedmjpError
from fedmjp.scenario import Scenario
from tests.boards import ENVIRONMENTS, ledger_of
from tests.experiments import record_directly
from tests.hostile import SECONDS, changed, damaged, fuzzed, within
from tests.test_admission import ROWS, submission

CAMPAIGN = """
name: small
title: A question
data: {source: bundled, pictures: 4, seed: 1}
shared: {settings: [a, c], mask_ratios: [0.1, 0.27]}
grids:
  - models: [deit_tiny, deit_small]
    defences: [[], [mjp], [{name: mjp, mask_ratio: 0.3}, "gaussian:noise=0.1"]]
    attacks: [patch_embedding, {name: patch_embedding, options: {reading: zeros}}, grey]
    threats: [{batch_size: [1, 2], labels_known: true}, {update: delta, local_steps: 2}]
    pictures: 2
seeds: [0, 1]
metrics: [psnr, mse]
image_size: 64
patch_size: 8
weights: {}
accuracy: {deit_tiny: {top1: 72.2, source: paper}}
budget: {hours: 1}
"""
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
SUFFIX = {"JPEG": ".jpg", "TIFF": ".tif"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@fuzzed
@given(content=damaged(CAMPAIGN.encode()) | changed(yaml.safe_load(CAMPAIGN)))
def test_a_campaign_file_is_read_or_refused_in_a_line(folder: Path, content: Any) -> None:
    path = folder / "campaign.yaml"
    path.write_bytes(content if isinstance(content, bytes) else yaml.safe_dump(content).encode())
    with within(SECONDS):
        try:
            read_campaign(path).experiments(device="cpu")
        except FedmjpError as error:
            assert "\n" not in str(error)  # noqa: PT017 (most are read)
            assert len(str(error)) < 20_000  # noqa: PT017


@cache
def encoded(form: str) -> bytes:
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (24, 20, 3), dtype=np.uint8))
    content = io.BytesIO()
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(content, form, **({} if form in ("BMP", "PPM", "GIF") else {"exif": exif}))
    return content.getvalue()


@fuzzed
@given(form=st.sampled_from(FORMATS), data=st.data())
def test_a_picture_is_read_or_refused_by_name(folder: Path, form: str, data: st.DataObject) -> None:
    place = folder / "pictures"
    (place / "class").mkdir(parents=True, exist_ok=True)
    path = place / "class" / f"picture{SUFFIX.get(form, f'.{form.lower()}')}"
    path.write_bytes(data.draw(damaged(encoded(form))))
    try:
        with within(SECONDS):
            image = open_source(str(place), size=16, classes=2).load(f"class/{path.name}").image
        assert image.shape == (3, 16, 16)
        assert 0 <= float(image.min()) <= float(image.max()) <= 1
    except FedmjpError as error:
        assert path.name in str(error)  # noqa: PT017
    finally:
        path.unlink()


@pytest.fixture(scope="module")
def board_folder(folder: Path) -> Path:
    """With an entry that was admitted before."""
    place = folder / "board"
    place.mkdir()
    ledger_of(ROWS)[0].save(place)
    (folder / "honest.json").write_text(json.dumps(submission()))
    admit(folder / "honest.json", place)
    return place


SUBMISSION = submission()


@fuzzed
@given(content=damaged(json.dumps(SUBMISSION).encode()) | changed(SUBMISSION))
def test_an_entry_is_admitted_or_refused_and_takes_no_other_with_it(board_folder: Path, content: Any) -> None:
    before, files = read_submitted(board_folder), set((board_folder / SUBMITTED).iterdir())
    path = board_folder.parent / "entry.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with within(SECONDS):
        try:
            admitted = admit(path, board_folder)
        except FedmjpError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert read_submitted(board_folder) == before
            return
        after = read_submitted(board_folder)
        assert [*before.claims, *admitted.claims] == sorted(after.claims, key=[*before.claims, *admitted.claims].index)
        ledger, trials = ledger_of(ROWS)
        board = board_of(ledger, trials, ENVIRONMENTS, submitted=after.entries, claims=after.claims)
        for text in (write(Report(board)) for write in (csv_text, markdown_text, latex_text)):
            assert text.encode()
    for admitted_file in set((board_folder / SUBMITTED).iterdir()) - files:
        admitted_file.unlink()


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Path:
    """What `fedmjp record` leaves behind, of a small model."""
    place = folder / "recorded"
    model = {"name": "deit_micro", "image_size": 32, "patch_size": 8}
    scenario = Scenario.parse({"model": model, "clients": 2, "pictures_per_client": 1, "defences": "mjp"})
    record_directly([scenario], RunFolder(place))
    pictures = {entry.name: entry.sha256 for entry in select_for(scenario).entries}
    about = {"scenarios": [scenario.model_dump(mode="json")], "pictures": pictures}
    (place / "manifest.json").write_text(json.dumps(about))
    return place


def in_header(content: bytes, draw: Any) -> bytes:
    """A safetensors file of which some fields were changed: a length of eight bytes, JSON, tensors."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    fields = json.loads(header["__metadata__"]["fields"])
    if draw(st.booleans()):
        header["__metadata__"]["fields"] = json.dumps(draw(changed(fields)))
    else:
        header = draw(changed(header))
    made = json.dumps(header).encode()
    return len(made).to_bytes(8, "little") + made + content[8 + length :]


@fuzzed
@given(data=st.data())
def test_records_are_attacked_or_refused_by_name(recorded: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(shutil.copytree(recorded, Path(name) / "records"))
        path = data.draw(st.sampled_from(sorted(path for path in place.rglob("*") if path.is_file())))
        content = path.read_bytes()
        if path.suffix == ".json":
            written = damaged(content) | changed(json.loads(content)).map(json.dumps).map(str.encode)
            path.write_bytes(data.draw(written))
        else:
            path.write_bytes(data.draw(damaged(content)) if data.draw(st.booleans()) else in_header(content, data.draw))
        with within(SECONDS), suppress(FedmjpError):
            for problem in use(place):
                assert isinstance(problem, str)


def use(place: Path) -> Iterator[str]:
    """What `fedmjp attack --uploads` does before and beside the attack itself."""
    found = open_records(place)
    for scenario in found.attacked(None, device="cpu"):
        experiment = Experiment.parse({"scenario": scenario, "attacks": ["patch_embedding"], "settings": ["b"]})
        yield found.digest()
        yield from found.problems(experiment)
        batches = [tuple(entry.name for entry in batch) for batch in found.batches(scenario)]
        source = found.source(experiment)
        for made in source.uploads(batches).values():
            if isinstance(made, Failure):
                yield made.reason
            else:
                with suppress(FedmjpError):
                    source.model(made.upload.weights)
                assert made.private.pictures


def test_the_good_files_are_good(folder: Path, recorded: Path) -> None:
    path = folder / "good.yaml"
    path.write_text(CAMPAIGN)
    assert read_campaign(path).experiments(device="cpu")
    assert len(list(itertools.islice(use(recorded), 2))) == 1, "a digest, and no problem"
