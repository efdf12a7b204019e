"""The study of training as it is done: what it uploads is what training uploads, and refusals are rows."""

from itertools import pairwise

import pandas as pd
import pytest
import torch

from fedmjp.data.selection import open_source, select
from fedmjp.models.build import build_vit
from fedmjp.scenario import Scenario
from tests.studies import load_study

study = load_study("realistic/study.py")
CLOSED, STEPS, figure, rows_of, summary = study.CLOSED, study.STEPS, study.figure, study.rows_of, study.summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def age() -> Scenario:
    return Scenario.parse({"model": {"name": "deit_micro", "image_size": 32, "patch_size": 8}})


@pytest.fixture(scope="module")
def table(age: Scenario) -> pd.DataFrame:
    selection = select(open_source("bundled", size=32, classes=1000), 4, seed=0)
    pictures = [selection.load(entry) for entry in selection.entries]
    rows = [row for approach in CLOSED for row in rows_of(age, pictures, approach, pictures)]
    return pd.DataFrame([{"round": number, **row} for number in (1, 2) for row in rows])


def test_train_mode_and_steps_hide_no_single_picture_and_batches_are_mixtures(table: pd.DataFrame) -> None:
    scored = table[table["attack"] == "patch_embedding"].dropna(subset="psnr")
    medians = scored.groupby(["step", "batch"])["psnr"].median()
    assert (medians[["gradient", "train", "steps"]].xs(1, level="batch") > 60).all()
    assert (medians.drop(1, level="batch") < 40).all()
    assert ("mixup", 1) not in medians.index


def test_what_refuses_says_why_once_per_cell(table: pd.DataFrame) -> None:
    refused = table[table["refusal"].notna()]
    assert set(refused["attack"]) == {approach.name for approach in CLOSED} - {"grey"}
    assert refused[["psnr", "rank1"]].isna().all(axis=None)
    by_step = refused.groupby("step")["refusal"]
    assert by_step.get_group("gradient").str.contains("one picture").any()
    assert by_step.get_group("adamw").str.contains("reads one step of AdamW, not 5").all()
    assert summary(table)["n"].sum() == table["refusal"].isna().sum()
    assert len(figure(table).axes) == 4


def test_a_server_that_fishes_takes_a_picture_out_of_a_batch_and_features_tell_all_of_them(table: pd.DataFrame) -> None:
    whole = table[(table["batch"] == 4) & table["step"].isin(["gradient", "train"])]
    assert (whole[whole["attack"] == "class_fishing, patch_embedding"]["psnr"] > 60).all()
    told = whole[whole["attack"] == "class_token"]
    assert (told["label_accuracy"] == 1).all()
    assert (told[told["step"] == "gradient"]["feature_error"] < 1e-3).all()


def test_a_server_made_for_adamw_takes_a_picture_out_of_its_steps_with_drop_path_and_smoothing(
    table: pd.DataFrame,
) -> None:
    fished = table[(table["batch"] == 4) & (table["attack"] == "class_fishing, patch_embedding")]
    medians = fished.groupby("step")["psnr"].median()
    assert (medians[["adamw", "adamw_train", "adamw_smoothed"]] > 40).all()
    assert medians["adamw_as_sgd"] < 20
    assert medians["adamw_train"] != medians["adamw"]


def test_a_client_in_train_mode_uploads_another_gradient(age: Scenario) -> None:
    selection = select(open_source("bundled", size=32, classes=1000), 4, seed=0)
    pictures = [selection.load(entry) for entry in selection.entries]
    scenario = Scenario.parse({"model": age.model, "pictures_per_client": 4, "batch_size": 4})
    network = build_vit(age.network)
    uploads = {step: STEPS[step].upload(scenario, pictures, network).upload for step in ("gradient", "train", "mixup")}
    name = "backbone.patch_embed.proj.weight"
    tensors = [upload.tensors[name] for upload in uploads.values()]
    assert uploads["train"].tensors.keys() == uploads["gradient"].tensors.keys()
    assert not any(torch.allclose(a, b) for a, b in pairwise(tensors))
