"""Campaign files: what they expand to, and what every mistake is told."""

from pathlib import Path

import pytest

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.data.selection import open_source, select
from fedmjp.defences.pipeline import pipeline_of
from fedmjp.errors import ConfigError
from fedmjp.settings import Setting

ROOT = Path(__file__).parents[1]
FILE = """\
name: tiny
data: {source: bundled, pictures: 2}
image_size: 64
metrics: [mse, psnr]
shared:
  defences: [none]
  settings: [a, c]
patch_size: 8
grids:
  - models: [deit_tiny]
    defences: [none, mjp]
    attacks: [patch_embedding, grey]
    mask_ratios: [0.27, 0.5]
  - models: [deit_tiny_april]
    attacks:
      - {name: april, options: {reading: zeros}}
    settings: [b]
"""


def read(folder: Path, text: str, *overrides: str) -> Campaign:
    path = folder / "campaign.yaml"
    path.write_text(text, encoding="utf-8")
    return read_campaign(path, overrides)


def test_grids_take_what_is_shared_unless_they_say_otherwise(tmp_path: Path) -> None:
    campaign = read(tmp_path, FILE)
    assert [grid.settings for grid in campaign.grids] == [(Setting.A, Setting.C), (Setting.B,)]
    labels = [[pipeline_of(each).label for each in grid.defences] for grid in campaign.grids]
    assert labels == [["none", "mjp"], ["none"]]


def test_experiments_are_the_product_of_seeds_threats_and_ratios(tmp_path: Path) -> None:
    text = FILE.replace("name: tiny", "name: tiny\nseeds: [3, 4]").replace(
        "mask_ratios: [0.27, 0.5]",
        "mask_ratios: [0.27, 0.5]\n    threats: [{batch_size: [1, 2]}, {update: delta, local_steps: [1, 5]}]",
    )
    experiments = read(tmp_path, text).experiments(device="cpu")
    first = [each for each in experiments if each.scenario.model.name == "deit_tiny"]
    asked = [each.scenario for each in first if len(each.attacks) > 1]  # twins have no grey
    found = [
        (one.seed, one.pipeline.label, one.pipeline.mask_ratio, one.pipeline.shuffles, one.update, one.batch_size,
         one.local_steps)
        for one in asked
    ]  # fmt: skip
    threats = [("gradient", 1, 1), ("gradient", 2, 1), ("delta", 1, 1), ("delta", 1, 5)]
    defences = [("none", 0.0, False)]
    for ratio in (0.27, 0.5):
        defences += [("jigsaw", ratio, True), ("mjp", ratio, False), ("mjp", ratio, True)]
    assert set(found) == {(seed, *defence, *threat) for seed in (3, 4) for defence in defences for threat in threats}
    assert len(found) == len(set(found)) == 2 * 7 * 4


def test_defences_are_pipelines_with_their_options(tmp_path: Path) -> None:
    listed = "defences: [none, mjp, {name: gaussian, noise: 0.001}, [mjp, {name: round, precision: bfloat16}]]"
    text = FILE.replace("defences: [none, mjp]", listed).replace("settings: [a, c]", "settings: [c]")
    experiments = read(tmp_path, text, "grids.0.mask_ratios=[0.4]").experiments(device="cpu")
    planned = dict.fromkeys(
        (each.scenario.pipeline.label, each.scenario.pipeline.mask_ratio, tuple(map(str, each.settings)))
        for each in experiments
        if each.scenario.model.name == "deit_tiny"
    )
    assert list(planned) == [
        ("jigsaw", 0.4, ("c",)),
        ("none", 0.0, ("a",)),
        ("mjp", 0.4, ("c",)),
        ("jigsaw + gaussian:noise=0.001", 0.4, ("c",)),
        ("gaussian:noise=0.001", 0.0, ("a",)),
        ("mjp + round:precision=bfloat16", 0.4, ("c",)),
        ("round:precision=bfloat16", 0.0, ("a",)),
    ], "what was asked for, and after each its twins; the undefended one once"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("[none, mpj]", r"line 11: grids.0.defences.1.0 = 'mpj': Unknown defence 'mpj'. Did you mean mjp\?"),
        ("\n    - none\n    - {name: gaussian, nois: 1}", r"line 13: .*unknown key 'nois', did you mean 'noise'\?"),
        ("\n    - none\n    - {name: gaussian, noise: -1}", r"line 13: .*noise = -1: Input should be greater than"),
        ("\n    - none\n    - [gaussian, mjp]", r"line 13: .*mjp acts on pictures, before gaussian"),
        ("\n    - mjp\n    - [mjp, mjp]", r"line 13: .*defence 'mjp' is named twice"),
        (
            "\n    - mjp\n    - [{name: secure_sum, clients: 3}]",
            "2 pictures make no whole uploads, which are of 3 each",
        ),
        ("[3]", r"line 11: grids.0.defences.0 = 3"),
        ("[]", r"line 11: grids.0.defences = \[\]"),
    ],
)
def test_bad_defences_are_told_with_their_line(tmp_path: Path, listed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, FILE.replace("defences: [none, mjp]", f"defences: {listed}")).experiments(device="cpu")
    assert "\n" not in str(caught.value)


def test_a_grid_may_take_the_first_pictures_only(tmp_path: Path) -> None:
    campaign = read(tmp_path, FILE, "grids.1.pictures=1")
    few, many = campaign.experiments(device="cpu")[-1], campaign.experiments(device="cpu")[0]
    selection = select(open_source("bundled", size=64, classes=1000), campaign.data.count, seed=0)
    assert selection.batches(few.scenario) == selection.batches(many.scenario)[:1]
    assert len(selection.batches(many.scenario)) == 2
    more = read(tmp_path, FILE, "grids.1.pictures=9").experiments(device="cpu")[-1]
    assert selection.batches(more.scenario) == selection.batches(many.scenario)


def test_overrides_replace_keys_and_elements(tmp_path: Path) -> None:
    campaign = read(tmp_path, FILE, "data.pictures=1", "grids.0.settings=[b]", "budget.hours=0.5", "title='a: b'")
    assert (campaign.data.pictures, campaign.grids[0].settings, campaign.budget.hours) == (1, (Setting.B,), 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("image_size", "image_sise", r"campaign.yaml, line 3: unknown key 'image_sise', did you mean 'image_size'\?"),
        ("mask_ratios", "mask_ratio", r"line 13: unknown key 'grids.0.mask_ratio', did you mean 'mask_ratios'\?"),
        ("  defences", "  defenses", r"line 6: unknown key 'shared.defenses', did you mean 'defences'\?"),
        ("{source: bundled,", "{sauce: bundled,", r"line 2: unknown key 'data.sauce', did you mean 'source'\?"),
        ("patch_embedding,", "patch_embeding,", r"line 12: .*'patch_embeding'. Did you mean patch_embedding"),
        ("[deit_tiny]", "[deit_tini]", r"line 10: .*Unknown model 'deit_tini'. Did you mean deit_tiny"),
        ("reading: zeros", "reding: zeros", r"line 16: .*unknown key 'reding', did you mean 'reading'\?"),
        ("[0.27, 0.5]", "[0.27, 1.5]", r"line 13: grids.0.mask_ratios.1 = 1.5: Input should be less than or equal"),
        ("[mse, psnr]", "[mse]", "metrics must hold psnr"),
        ("[mse, psnr]", "[mse, psnr", "is not YAML"),
        ("[mse, psnr]", "[mse, psnr, sim]", "Unknown metric 'sim'. Did you mean ssim"),
        ("name: tiny", "name: tiny\nname: other", "line 2: key 'name' was given before, in line 1"),
        ("name: tiny", "name: Tiny!", "line 1: name = 'Tiny!'"),
        ("name: tiny", "weights: {deit_base: x}\nname: tiny", "weights or accuracy of deit_base, which no grid"),
        (FILE, "- 1", "must hold keys and values"),
        (FILE, "", "must hold keys and values"),
        ("grids:", "grid:", r"line 9: unknown key 'grid', did you mean 'grids'\?"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_line_and_suggestion(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, FILE.replace(old, new, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.picures=2", r"override: unknown key 'data.picures', did you mean 'pictures'\?"),
        ("data.pictures", "is not of the form KEY=VALUE"),
        ("data.pictures=0", "override: data.pictures = 0"),
        ("grids.7.settings=[a]", "cannot be applied"),
        ("data.pictures=[", "cannot be applied"),
    ],
)
def test_mistakes_in_overrides_are_told(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, FILE, override)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_campaign(tmp_path / "none.yaml")


def test_batches_that_do_not_divide_the_pictures_are_told(tmp_path: Path) -> None:
    text = FILE.replace("settings: [b]", "threats: [{batch_size: 3}]")
    with pytest.raises(ConfigError, match="2 pictures make no whole uploads, which are of 3 each"):
        read(tmp_path, text).experiments(device="cpu")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "campaigns").glob("*.yaml")), ids=lambda path: path.stem)
def test_reference_campaigns_are_valid(path: Path) -> None:
    campaign = read_campaign(path)
    assert campaign.name == path.stem
    assert campaign.experiments(device="cpu")
