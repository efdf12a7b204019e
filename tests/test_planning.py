"""From an experiment to cells and trials: keys, refused cells, pictures that are left out, what is shared."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedmjp import provenance
from fedmjp.benchmarks.campaign.prepare import describe
from fedmjp.benchmarks.plan import planning
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment, experiments_of
from fedmjp.benchmarks.plan.planning import plan
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.data.pictures import PictureEntry
from fedmjp.data.selection import select_for
from fedmjp.defences import DEFENCES
from fedmjp.errors import ConfigError, OutputError
from fedmjp.scenario import make_batch_scenario
from fedmjp.settings import Setting
from tests.conftest import SMALL, small_scenario
from tests.experiments import small_experiments

Batches = list[tuple[PictureEntry, ...]]


@pytest.fixture(scope="module")
def experiments() -> list[Experiment]:
    return small_experiments()


@pytest.fixture(scope="module")
def batches(experiments: list[Experiment]) -> Batches:
    return select_for(experiments[0].scenario).batches(experiments[0].scenario)


def planned(experiments: Sequence[Experiment], batches: Batches, uploads: str = "direct") -> TrialPlan:
    return plan(experiments, [batches] * len(experiments), uploads=uploads)


def keys(experiments: Sequence[Experiment], batches: Batches, uploads: str = "direct") -> list[str]:
    return [trial.key for trial in planned(experiments, batches, uploads).tasks]


def changed(experiments: Sequence[Experiment], **values: object) -> list[Experiment]:
    return [each.model_copy(update=values) for each in experiments]


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({}, {1}),
        ({"batch_size": 2}, {2}),
        ({"batch_size": 2, "defences": "secure_sum:clients=2"}, {4}),
        ({"defences": "secure_sum:clients=2", "server": "suppression"}, {1}),
        ({"batch_size": 2, "defences": "secure_sum:clients=2", "server": "suppression"}, {2}),
        ({"batch_size": 4, "server": "class_fishing"}, {1}),
        ({"batch_size": 2, "server": "token_imprint"}, {2}),
    ],
)
def test_a_ledger_knows_which_pictures_came_in_one_upload(values: dict[str, object], sizes: set[int]) -> None:
    """As the trials of the plan say, of eight pictures at two seeds."""
    model = {"name": "deit_tiny", **SMALL}
    scenarios = [make_batch_scenario({"model": model, "seed": seed, **values}, 8) for seed in (0, 1)]
    attacks = [{"name": name} for name in ("grey", "token_imprint", "mjp_prior")]
    asked = [Experiment.parse({"scenario": one, "attacks": attacks, "settings": ["a"]}) for one in scenarios]
    entries = tuple(PictureEntry(f"{place}.png", place, "0") for place in range(8))
    selection = replace(select_for(scenarios[0]), entries=entries)
    made = plan(asked, [selection.batches(one) for one in scenarios], uploads="direct")
    ledger = made
    derived = ledger.trials.assign(upload=ledger.uploads).groupby(["cell", "seed", "upload"])["picture"].agg(set)
    stated: dict[tuple[object, ...], set[str]] = {}
    for trial in made.tasks:
        stated.setdefault((trial.cell, trial.seed, trial.batch), set()).add(trial.picture.name)
    assert sorted(map(sorted, derived)) == sorted(map(sorted, stated.values()))
    assert {len(pictures) for pictures in derived} == sizes


def test_cells_say_what_a_client_does_in_each_setting(experiments: list[Experiment], batches: Batches) -> None:
    cells = list(planned(experiments, batches).cells)
    done = {(cell.defence, str(cell.setting), cell.mask_ratio, cell.pipeline.shuffles) for cell in cells}
    assert done == {
        ("none", "a", 0.0, False),
        ("jigsaw", "b", 0.27, True),
        ("jigsaw", "c", 0.27, True),
        ("mjp", "a", 0.27, False),
        ("mjp", "b", 0.27, True),
        ("mjp", "c", 0.27, True),
    }


def test_every_defended_cell_has_its_undefended_twin_and_one_per_defence_left_out(batches: Batches) -> None:
    asked = small_scenario(defences=["mjp", "gaussian"], clients=2, pictures_per_client=2)
    tried = (AttackConfig(name="patch_embedding"), AttackConfig(name="grey"))
    found = experiments_of(asked, (Setting.C,), tried, mask_ratio=0.27)
    cells = list(planned(found, batches).cells)
    assert [(cell.defence, str(cell.setting), cell.attack) for cell in cells] == [
        ("mjp + gaussian", "c", "patch_embedding"),
        ("mjp + gaussian", "c", "grey"),
        ("none", "a", "patch_embedding"),
        ("gaussian", "a", "patch_embedding"),
        ("mjp", "c", "patch_embedding"),
    ]


def test_keys_are_unique_stable_and_depend_on_what_determines_the_trial(
    experiments: list[Experiment], batches: Batches
) -> None:
    base = keys(experiments, batches)
    assert len(set(base)) == len(base) == 96
    assert keys(small_experiments(), batches) == base
    read = {"name": "patch_embedding", "options": {"reading": "zeros"}}
    other_option = keys(small_experiments(models={"deit_tiny": read, "deit_tiny_april": "april"}), batches)
    assert len(set(base) & set(other_option)) == 96 - 24
    for other in (
        small_experiments(mask_ratio=0.5),
        small_experiments(seed=1),
        changed(experiments, protocol="8bit"),
        changed(experiments, metrics=("mse",)),
        small_experiments(labels_known=True),
        small_experiments(update="delta", local_steps=2),
    ):
        unchanged = set(base) & set(keys(other, batches))
        # An undefended clean picture does not depend on the mask ratio.
        ratios = {each.scenario.pipeline.mask_ratio for each in other}
        assert len(unchanged) == (16 if 0.5 in ratios else 0)


def test_keys_depend_on_defences_and_their_options(batches: Batches) -> None:
    tried = (AttackConfig(name="grey"),)
    found = [
        keys(experiments_of(small_scenario(defences=each), (Setting.A,), tried, mask_ratio=0.27), batches[:1])
        for each in ("none", "gaussian", "gaussian:noise=0.1", "clip", ["clip", "gaussian"], ["gaussian", "clip"])
    ]
    assert len({key for each in found for key in each}) == len(found)


def test_keys_depend_on_the_code_of_another_packages_defence(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, tried = small_scenario(defences="gaussian"), (AttackConfig(name="grey"),)
    experiments = experiments_of(scenario, (Setting.A,), tried, mask_ratio=0.27)
    monkeypatch.setattr(DEFENCES.get("gaussian"), "__module__", "elsewhere.noise")
    found = []
    for code in ("of yesterday", "of today"):
        monkeypatch.setattr("fedmjp.provenance.package_digest", lambda _module, code=code: code)
        planning._code.cache_clear()
        found.append(keys(experiments, batches[:1]))
    planning._code.cache_clear()
    assert found[0] != found[1]


def test_keys_depend_on_device_versions_code_learning_rate_and_the_picture_itself(
    experiments: list[Experiment], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, mate = batches[0][0], batches[1][0]
    base = set(keys(experiments, [(picture,)]))
    other = [
        keys(small_experiments(device="cuda"), [(picture,)]),
        keys(small_experiments(server_learning_rate=0.1), [(picture,)]),
        keys(experiments, [(replace(picture, sha256="0"),)]),
        keys(experiments, [(replace(picture, label=3),)]),
        keys(experiments, [(replace(picture, name="other"),)]),
        keys(experiments, [(picture, mate)]),
        keys(experiments, [(picture,)], uploads="federated"),
    ]
    monkeypatch.setattr("fedmjp.provenance.code_digest", lambda: "changed code")
    other.append(keys(experiments, [(picture,)]))
    monkeypatch.undo()
    versions = provenance.versions()
    monkeypatch.setattr("fedmjp.provenance.versions", lambda: {**versions, "torch": "0.0"})
    other.append(keys(experiments, [(picture,)]))
    for each in other:
        assert base.isdisjoint(each)


def test_what_experiments_share_is_planned_once(experiments: list[Experiment], batches: Batches) -> None:
    both = planned([*experiments, *small_experiments(mask_ratio=0.5)], batches)
    assert len({trial.key for trial in both.tasks}) == len(both.trials) == 96 + 96 - 16
    assert len(both.cells) == len(set(both.cells)) == 24 + 24 - 4
    again = planned([*experiments, *experiments], batches)
    assert (len(again.trials), sum(len(part.trials) for part in again.parts[len(experiments) :])) == (96, 0)


def refusing(batches: Batches) -> TrialPlan:
    attacks = {"deit_tiny": ("april", "patch_embedding"), "deit_tiny_april": ("april", "patch_embedding")}
    found = [each for place in range(2) for each in small_experiments(models={k: v[place] for k, v in attacks.items()})]
    return planned(found, batches)


def test_an_attack_that_does_not_apply_is_a_cell_with_its_reason_and_no_trial(batches: Batches) -> None:
    made = refusing(batches)
    refused = {(each.model, each.attack) for each in made.cells if each.refusal}
    assert refused == {("deit_tiny", "april")}
    assert all("first block" in (each.refusal or "") for each in made.cells if each.attack == "april"
               and each.model == "deit_tiny")  # fmt: skip
    assert ("deit_tiny", "april") not in {(trial.cell.model, trial.cell.attack) for trial in made.tasks}


def test_a_bound_is_refused_where_uploads_were_recorded(batches: Batches) -> None:
    bound = small_experiments(models={"deit_tiny": "oracle_patch_embedding"})
    direct, federated = (planned(bound, batches, uploads).cells for uploads in ("direct", "federated"))
    assert all(each.refusal is None for each in direct)
    assert all("bound" in (each.refusal or "") for each in federated if each.role == "bound")


def test_a_withheld_tensor_is_refused_at_planning(batches: Batches) -> None:
    found = small_scenario(defences="withhold:roles=position_embedding", clients=2, pictures_per_client=2)
    tried = (AttackConfig(name="patch_embedding"),)
    cells = planned(experiments_of(found, (Setting.A,), tried, mask_ratio=0.27), batches).cells
    assert ["withhold" in (each.refusal or "") for each in cells] == [True, False], "the twin is not refused"


def test_pictures_that_a_prior_was_made_of_are_left_out_of_its_cells_and_counted(
    experiments: list[Experiment], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = batches[0][0].name
    monkeypatch.setattr("fedmjp.benchmarks.plan.planning.measured_on", lambda name, sha256: name == known)
    made = planned(experiments, batches)
    left_out = {each.attack: each.left_out for each in made.cells}
    assert left_out == {"april": 1, "patch_embedding": 0, "grey": 0}
    assert known not in {trial.picture.name for trial in made.tasks if trial.cell.attack == "april"}


def test_settings_that_do_not_fit_a_scenario_are_refused() -> None:
    with pytest.raises(ConfigError, match="settings b do not fit uploads of the clean picture"):
        Experiment.parse({"scenario": small_scenario(), "attacks": ("grey",), "settings": ("a", "b")})
    with pytest.raises(ConfigError, match="attacks must each be named once"):
        Experiment.parse({"scenario": small_scenario(), "attacks": ("grey", "grey"), "settings": ("a",)})


def test_a_ledger_comes_back_as_it_was_saved(batches: Batches, tmp_path: Path) -> None:
    made = refusing(batches)
    ledger = describe(made, title='Some, "title"', uploads="here", command="a 'b'")
    ledger.save(tmp_path)
    found = TrialPlan.load(tmp_path)
    assert found.cells == made.cells
    assert found.about == ledger.about
    assert found.trials.equals(ledger.trials)
    paths = {path for trial in made.tasks for path in trial.files.values()}
    rows = found.trials.to_dict("records")
    assert paths == {path for row in rows for path in found.files_of(row).values()}


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_a_folder_without_a_whole_plan_is_named(
    experiments: list[Experiment], batches: Batches, damage: str, tmp_path: Path
) -> None:
    folder = tmp_path
    describe(planned(experiments, batches), title="t", uploads="u", command="c").save(folder)
    path = folder / "plan.json"
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_text(path.read_text()[:100])
        case _:
            path.write_text("[1]")
    with pytest.raises(OutputError, match="holds no results" if damage == "missing" else "damaged"):
        TrialPlan.load(folder)
