"""Configuration: refusals in one line, round trip through Flower's run-config, digests."""

import tomllib

import pytest

from benchmarks.federation.bundle import as_toml
from fedmjp.config import FederationConfig, ModelConfig, RecordingConfig, from_run_config, to_run_config
from fedmjp.errors import ConfigError
from fedmjp.settings import Picture, Setting
from fedmjp.threat import ThreatModel


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown key 'mask_ration', did you mean 'mask_ratio'"):
        FederationConfig.parse({"mask_ration": 0.3})


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_mask_ratio_outside_zero_to_one_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=f"mask-ratio = {ratio}"):
        FederationConfig.parse({"mask_ratio": ratio})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": ("deit_tiny", "deit_tiny")}, "each named once, got deit_tiny, deit_tiny"),
        ({"models": ()}, "at least one"),
        ({"server_learning_rate": float("inf")}, "server-learning-rate = inf"),
        ({"seed": 2**70}, "seed = "),
    ],
)
def test_values_that_cannot_be_run_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FederationConfig.parse(values)


@pytest.mark.parametrize("folder", ['with "quotes" and spaces', "größe/\U0001f431", "back\\slash"])
def test_any_path_survives_the_run_config_file(folder: str) -> None:
    flat = to_run_config(FederationConfig(data=folder))
    assert from_run_config(FederationConfig, tomllib.loads(as_toml(flat))).data == folder


def test_run_config_round_trips() -> None:
    config = FederationConfig(
        models=("deit_tiny", "deit_small"), defences=("none", "mjp"), inputs=tuple(Picture), mask_ratio=0.5, seed=7
    )
    recording = RecordingConfig(uploads_folder="a folder", upload_tensors=("x", "y"))
    flat = to_run_config(config, recording)
    assert all(isinstance(value, str | int | float | bool) for value in flat.values())
    assert from_run_config(FederationConfig, flat) == config
    assert from_run_config(RecordingConfig, flat) == recording


def test_clients_take_their_pictures_in_turn_version_by_version() -> None:
    config = FederationConfig(pictures_per_client=2, inputs=tuple(Picture))
    assert config.rounds == 4
    assert [config.turn(r) for r in range(1, 5)] == [
        (0, Picture.CLEAN, 0),
        (1, Picture.CLEAN, 0),
        (0, Picture.SHUFFLED, 0),
        (1, Picture.SHUFFLED, 0),
    ]


def test_clients_go_through_their_pictures_as_often_as_asked() -> None:
    config = FederationConfig(pictures_per_client=2, uploads_per_picture=3, inputs=tuple(Picture))
    turns = [config.turn(r) for r in range(1, config.rounds + 1)]
    assert config.rounds == 12
    assert turns[:6] == [(batch, Picture.CLEAN, number) for number in range(3) for batch in range(2)]
    assert [config.round_of(turn) for turn in turns] == list(range(1, 13))


def test_digest_depends_on_every_value() -> None:
    base = ModelConfig(name="deit_tiny")
    changes = {"name": "deit_small", "defence": "mjp", "image_size": 32, "patch_size": 8, "classes": 10, "seed": 1}
    digests = {base.model_copy(update={key: value}).digest() for key, value in changes.items()}
    assert len(digests | {base.digest()}) == len(changes) + 1
    assert ModelConfig(name="deit_tiny").digest() == base.digest()


def test_settings_are_those_of_the_paper() -> None:
    assert [(s.gradient_of, s.compared_with) for s in Setting] == [
        (Picture.CLEAN, Picture.CLEAN),
        (Picture.SHUFFLED, Picture.SHUFFLED),
        (Picture.SHUFFLED, Picture.CLEAN),
    ]


def test_threat_model_says_what_the_server_is_told() -> None:
    assert "neither labels nor masks" in ThreatModel().sentence()
    assert "is told the labels but no masks," in ThreatModel(labels_known=True).sentence()
    assert "only the sum" in ThreatModel(individual_updates=False).sentence()


def test_threat_digest_is_that_of_published_results_where_nothing_new_is_done() -> None:
    """Of the entries in results/: their ids were made before protocols could degrade uploads."""
    assert ThreatModel().digest() == "701d4d3c8db260dfdb17df6171dad4bd79471125a9360e13e08cfe94f2341104"
    changes = {"uploads_per_picture": 2, "precision": "float16", "noise": 0.1, "kept": 0.5}
    digests = {ThreatModel.parse({name: value}).digest() for name, value in changes.items()}
    assert len(digests | {ThreatModel().digest()}) == 5
