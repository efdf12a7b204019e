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
        (0, Picture.CLEAN),
        (1, Picture.CLEAN),
        (0, Picture.SHUFFLED),
        (1, Picture.SHUFFLED),
    ]


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
