"""From an experiment to cells and trials: keys, refused cells, pictures that are left out, what is shared."""

from dataclasses import replace

import pytest

from benchmarks.campaign.prepare import ledger_of
from benchmarks.folder.ledger import Ledger
from benchmarks.folder.output import OutputFolder
from benchmarks.plan.experiment import AttackConfig, Experiment, Plan
from benchmarks.plan.planning import plan
from fedmjp import provenance
from fedmjp.data.pictures import PictureEntry
from fedmjp.data.selection import select_for
from fedmjp.errors import ConfigError, OutputError
from fedmjp.settings import Picture, Setting
from tests.experiments import small_experiment

Batches = list[tuple[PictureEntry, ...]]


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return small_experiment()


@pytest.fixture(scope="module")
def batches(experiment: Experiment) -> Batches:
    return select_for(experiment.federation).batches(experiment.federation)


def keys(experiment: Experiment, batches: Batches, uploads: str = "direct") -> list[str]:
    return [trial.key for trial in plan([experiment], [batches], uploads=uploads).trials]


def test_cells_name_the_ratio_that_went_into_the_gradient(experiment: Experiment, batches: Batches) -> None:
    defences = experiment.federation.model_copy(update={"defences": ("none", "jigsaw", "mjp")})
    planned = plan([experiment.model_copy(update={"federation": defences})], [batches], uploads="direct")
    ratios = {(each.cell.defence, each.cell.setting): each.cell.mask_ratio for each in planned.cells}
    only_mjp_masks_a_clean_picture = {
        (defence, setting): 0.0 if setting is Setting.A and defence != "mjp" else 0.27
        for defence in ("none", "jigsaw", "mjp")
        for setting in Setting
    }
    assert ratios == only_mjp_masks_a_clean_picture


def test_keys_are_unique_stable_and_depend_on_what_determines_the_trial(
    experiment: Experiment, batches: Batches
) -> None:
    base = keys(experiment, batches)
    assert len(set(base)) == len(base) == 96
    assert keys(small_experiment(), batches) == base
    read = AttackConfig(name="patch_embedding", options={"reading": "zeros"})
    attacks = {"deit_tiny": (read, AttackConfig(name="grey")), "deit_tiny_april": experiment.attacks["deit_tiny_april"]}
    other_option = keys(experiment.model_copy(update={"attacks": attacks}), batches)
    assert len(set(base) & set(other_option)) == 96 - 24
    for changed in (
        small_experiment(mask_ratio=0.5),
        small_experiment(seed=1),
        small_experiment(patch_size=16),
        experiment.model_copy(update={"protocol": "8bit"}),
        experiment.model_copy(update={"metrics": ("mse",)}),
        experiment.model_copy(update={"labels_known": True}),
        small_experiment(update="delta", local_steps=2),
    ):
        unchanged = set(base) & set(keys(changed, batches))
        # An undefended clean picture does not depend on the mask ratio.
        assert len(unchanged) == (16 if changed.federation.mask_ratio == 0.5 else 0)


def test_keys_depend_on_device_versions_code_learning_rate_and_the_picture_itself(
    experiment: Experiment, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture, mate = batches[0][0], batches[1][0]
    base = set(keys(experiment, [(picture,)]))
    changed = [
        keys(small_experiment(device="cuda"), [(picture,)]),
        keys(small_experiment(server_learning_rate=0.1), [(picture,)]),
        keys(experiment, [(replace(picture, sha256="0"),)]),
        keys(experiment, [(replace(picture, label=3),)]),
        keys(experiment, [(replace(picture, name="other"),)]),
        keys(experiment, [(picture, mate)]),
        keys(experiment, [(picture,)], uploads="federated"),
    ]
    monkeypatch.setattr("fedmjp.provenance.code_digest", lambda: "changed code")
    changed.append(keys(experiment, [(picture,)]))
    monkeypatch.undo()
    versions = provenance.versions()
    monkeypatch.setattr("fedmjp.provenance.versions", lambda: {**versions, "torch": "0.0"})
    changed.append(keys(experiment, [(picture,)]))
    for other in changed:
        assert base.isdisjoint(other)


def test_what_experiments_share_is_planned_once(experiment: Experiment, batches: Batches) -> None:
    other = small_experiment(mask_ratio=0.5)
    both = plan([experiment, other], [batches, batches], uploads="direct")
    assert len({trial.key for trial in both.trials}) == len(both.trials) == 96 + 96 - 16
    assert len(both.cells) == len({planned.cell for planned in both.cells}) == 24 + 24 - 4
    again = plan([experiment, experiment], [batches, batches], uploads="direct")
    assert (len(again.trials), len(again.parts[1].trials)) == (96, 0)


def refusing(experiment: Experiment, batches: Batches, **federation: object) -> Plan:
    changed = small_experiment(**federation)
    attacks = dict.fromkeys(changed.federation.models, ("april", "patch_embedding", "grey"))
    values = {**dict(changed), "attacks": attacks}
    return plan([Experiment.parse(values)], [batches], uploads="direct")


def test_an_attack_that_does_not_apply_is_a_cell_with_its_reason_and_no_trial(
    experiment: Experiment, batches: Batches
) -> None:
    planned = refusing(experiment, batches)
    refused = {(each.cell.model, each.cell.attack) for each in planned.cells if each.refusal}
    assert refused == {("deit_tiny", "april")}
    assert all("first block" in (each.refusal or "") for each in planned.cells if each.cell.attack == "april"
               and each.cell.model == "deit_tiny")  # fmt: skip
    assert ("deit_tiny", "april") not in {(trial.cell.model, trial.cell.attack) for trial in planned.trials}


def test_a_bound_is_refused_where_uploads_were_recorded(experiment: Experiment, batches: Batches) -> None:
    attacks = dict.fromkeys(experiment.federation.models, (AttackConfig(name="oracle_patch_embedding"),))
    bound = experiment.model_copy(update={"attacks": attacks})
    assert all(each.refusal is None for each in plan([bound], [batches], uploads="direct").cells)
    assert all("bound" in (each.refusal or "") for each in plan([bound], [batches], uploads="federated").cells)


def test_pictures_that_a_prior_was_made_of_are_left_out_of_its_cells_and_counted(
    experiment: Experiment, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = batches[0][0].name
    monkeypatch.setattr("benchmarks.plan.planning.measured_on", lambda name, sha256: name == known)
    planned = plan([experiment], [batches], uploads="direct")
    left_out = {each.cell.attack: each.left_out for each in planned.cells}
    assert left_out == {"april": 1, "patch_embedding": 0, "grey": 0}
    assert known not in {trial.picture.name for trial in planned.trials if trial.cell.attack == "april"}


def test_experiments_that_do_not_fit_together_are_refused(experiment: Experiment) -> None:
    with pytest.raises(ConfigError, match="attacks names none for deit_tiny_april"):
        Experiment.parse({"federation": experiment.federation, "attacks": {"deit_tiny": ("grey",)}})
    shuffled_only = experiment.federation.model_copy(update={"inputs": (Picture.SHUFFLED,)})
    with pytest.raises(ConfigError, match="settings a need gradients"):
        Experiment.parse({"federation": shuffled_only, "attacks": experiment.attacks})


def test_a_ledger_comes_back_as_it_was_saved(
    experiment: Experiment, batches: Batches, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = OutputFolder(tmp_path_factory.mktemp("ledger"))
    planned = refusing(experiment, batches)
    ledger = ledger_of(experiment, planned, title='Some, "title"', uploads="here", command="a 'b'")
    ledger.save(folder.root)
    found = Ledger.load(folder.root)
    assert found.cells == planned.cells
    assert found.about == ledger.about
    assert found.trials.equals(ledger.trials)
    paths = {
        str(path.relative_to(folder.pictures.root)) for trial in planned.trials for path in folder.pictures.of(trial)
    }
    assert paths == set(found.trials[["clean", "shuffled", "reconstruction"]].to_numpy().ravel())


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_a_folder_without_a_whole_plan_is_named(experiment: Experiment, batches: Batches, damage: str,
                                                tmp_path_factory: pytest.TempPathFactory) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("ledger")
    ledger_of(experiment, plan([experiment], [batches], uploads="direct"), title="t", uploads="u", command="c").save(
        folder
    )
    path = folder / "plan.json"
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_text(path.read_text()[:100])
        case _:
            path.write_text("[1]")
    with pytest.raises(OutputError, match="holds no results" if damage == "missing" else "damaged"):
        Ledger.load(folder)
