"""Scenarios: what they refuse, what they are held against, and what settings make of them."""

from pathlib import Path

import pytest

from fedmjp.benchmarks.federation.simulation import RunFolder, simulate
from fedmjp.config import RunConfig
from fedmjp.defences.pipeline import DefenceConfig, pipeline_of
from fedmjp.errors import ConfigError
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture, Setting
from fedmjp.setups import Turn


def test_a_defence_reads_the_same_from_text_and_from_a_file() -> None:
    text = DefenceConfig.parse("gaussian:noise=0.001")
    assert text == DefenceConfig.model_validate({"name": "gaussian", "noise": 1e-3})
    assert hash(text) == hash(DefenceConfig.model_validate({"name": "gaussian", "noise": 1e-3}))
    assert DefenceConfig.parse(text.text) == text


def test_labels_leave_out_defaults_and_what_has_a_column() -> None:
    scenario = Scenario.parse({"defences": ["mjp:mask_ratio=0.5", "gaussian:noise=0.001"]})
    assert scenario.pipeline.label == "mjp + gaussian:noise=0.001"
    assert scenario.pipeline.mask_ratio == 0.5
    assert Scenario().pipeline.label == "none"
    assert Scenario.parse({"defences": "gaussian:noise=0.01"}).pipeline.label == "gaussian"


@pytest.mark.parametrize(
    ("defences", "told"),
    [
        (["gausian"], "Did you mean gaussian"),
        (["gaussian:noize=1"], "did you mean 'noise'"),
        (["gaussian:noise=-1"], "greater than 0"),
        (["gaussian:noise"], "is not KEY=VALUE"),
        (["gaussian:noise=1,noise=2"], "given twice"),
        (["gaussian", "gaussian:noise=0.1"], "named twice"),
        (["gaussian", "mjp"], "name mjp first"),
        (["jigsaw", "mjp"], "both shuffle"),
        (["mjp", "jigsaw"], "both shuffle"),
        (["secure_sum:clients=2", "clip"], "name clip first"),
    ],
)
def test_what_makes_no_pipeline_is_told_in_one_line(defences: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        Scenario.parse({"defences": defences, "clients": 2})
    assert "\n" not in str(raised.value)


def test_settings_decide_what_is_shuffled() -> None:
    plain, mjp = Scenario(), Scenario.parse({"defences": "mjp:mask_ratio=0.5"})
    assert (plain.gradient_of, mjp.gradient_of) == (Picture.CLEAN, Picture.SHUFFLED)
    assert plain.in_setting(Setting.A, 0.3) == plain
    shuffled = plain.in_setting(Setting.C, 0.3)
    assert shuffled == Scenario.parse({"defences": "jigsaw:mask_ratio=0.3"})
    assert shuffled.in_setting(Setting.A, 0.3) == plain, "a jigsaw that shuffles nothing is no defence"
    masked = mjp.in_setting(Setting.A, 0.3)
    assert masked.gradient_of is Picture.CLEAN
    assert masked.network.unknown_embedding
    assert masked.pipeline.mask_ratio == 0.5
    assert mjp.in_setting(Setting.B, 0.3) == mjp


def test_twins_leave_out_everything_then_each_defence() -> None:
    scenario = Scenario.parse({"defences": ["mjp", "gaussian"]})
    assert [twin.pipeline.label for twin in scenario.twins] == ["none", "gaussian", "mjp"]
    assert [twin.pipeline.label for twin in Scenario.parse({"defences": "mjp"}).twins] == ["none"]
    assert Scenario().twins == []


def test_what_is_done_to_updates_is_told_to_the_server_and_pictures_are_not() -> None:
    threat = Scenario.parse({"defences": ["mjp", "gaussian"]}).threat
    assert [config.name for config in threat.defences] == ["gaussian"]
    assert "gaussian" in threat.sentence()
    assert threat.undefended == Scenario().threat


def test_turns_and_rounds_are_inverse() -> None:
    scenario = Scenario.parse({"pictures_per_client": 4, "batch_size": 2, "uploads_per_picture": 3})
    turns = [scenario.turn(server_round) for server_round in range(1, scenario.rounds + 1)]
    assert turns == [Turn(batch, number) for number in range(3) for batch in range(2)]
    assert [scenario.round_of(turn) for turn in turns] == list(range(1, 7))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"local_steps": 2}, "set update to delta"),
        ({"pictures_per_client": 3, "batch_size": 2}, "does not divide"),
        ({"clients": 3, "defences": "secure_sum:clients=2"}, "multiple of 2"),
        ({"model": {"name": "deit_small", "image_size": 100}}, "multiple of patch size"),
        ({"defense": "mjp"}, "did you mean 'defences'"),
    ],
)
def test_contradictions_are_told(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Scenario.parse(values)


@pytest.mark.parametrize(
    "values", [{"seed": -1}, {"sede": 1}, {"defences": ["gausian"]}, {"training": {"rounds": 0}}, {"local_steps": 2}]
)
def test_python_is_told_what_commands_print(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as printed:
        Scenario.parse(values)
    with pytest.raises(ConfigError) as raised:
        Scenario(**values)
    assert str(raised.value) == str(printed.value)
    assert len(str(raised.value).splitlines()) == 1


def test_one_seed_draws_weights_too_unless_the_model_has_its_own() -> None:
    assert Scenario.parse({"seed": 3}).model.seed == 3
    assert Scenario.parse({"seed": 3, "model": "deit_tiny"}).model.seed == 3
    assert Scenario.parse({"seed": 3, "model": {"name": "deit_tiny", "seed": 5}}).model.seed == 5


def test_a_scenario_survives_json_and_flower() -> None:
    scenario = Scenario.parse({"defences": ["mjp", {"name": "gaussian", "noise": 1e-3}], "clients": 2})
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario
    run = RunConfig(scenarios="[]", upload_tensors=("a", "b"))
    assert RunConfig.read(run.flat() | {"another-app": 1}) == run


def test_the_digest_of_a_scenario_depends_on_its_defences_and_their_order() -> None:
    digests = {
        Scenario.parse({"defences": each}).digest()
        for each in ("none", "mjp", "gaussian", "gaussian:noise=0.01", ["mjp", "gaussian"], ["gaussian:noise=0.5"])
    }
    assert len(digests) == 5, "what says the default is the default"
    assert pipeline_of(()) is pipeline_of(())


def test_scenarios_that_would_mix_their_records_are_not_played_in_one_run() -> None:
    one, other = (Scenario.parse({"defences": "mjp", "seed": seed}) for seed in (0, 1))
    with pytest.raises(ConfigError, match=f"2 scenarios would leave their records in {one.folder}"):
        simulate([one, other], RunFolder(Path("unused")))
