"""Configuration: refusals in one line, round trip through Flower's run-config, digests."""

import tomllib
from typing import Any

import pytest

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.campaign.spec import Campaign
from fedmjp.benchmarks.deployment.layout import DeploymentConfig
from fedmjp.benchmarks.federation.bundle import as_toml
from fedmjp.clients.gate.policy import Policy
from fedmjp.config import Config, ModelConfig, RunConfig
from fedmjp.defences import DEFENCES
from fedmjp.errors import ConfigError
from fedmjp.registry import Registry
from fedmjp.scenario import Scenario, TrainingScenario, make_run_config, parse_scenario, read_scenarios
from fedmjp.settings import Picture, Setting
from fedmjp.threat import SERVERS, ThreatModel
from fedmjp.training.config import TrainingConfig
from tests.federations import PLAIN

SHORT = {"rounds": 8, "recipe": {"warmup_epochs": 0}}


def test_unknown_keys_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown key 'batch_sise', did you mean 'batch_size'"):
        Scenario.parse({"batch_sise": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"server_learning_rate": float("inf")}, "server_learning_rate = inf"),
        ({"seed": 2**70}, "seed = "),
        ({"defences": ["mjp:mask_ratio=1.5"]}, "mask_ratio = '1.5'"),
        ({"local_steps": 2}, "set update to delta"),
        ({"training": SHORT, "batch_size": 2}, "batch_size is of single batches"),
        ({"training": SHORT, "server_learning_rate": 0}, "server_learning_rate 0 trains nothing"),
        ({"training": {"rounds": 2, "records": [3]}}, "records of round 3 were asked for, but there are rounds 1 to 2"),
        ({"training": SHORT, "defences": ["dp_sgd"]}, "dp_sgd protects single pictures, and mixed ones are of two"),
        (
            {"training": {**SHORT, "recipe": {**PLAIN, "repeats": 3}}, "defences": ["dp_sgd"]},
            "dp_sgd protects single pictures, and a step holds 3 versions of each: set repeats to 1",
        ),
        ({"training": SHORT, "defences": ["mjp:mask_ratio=0.005"]}, "mask ratio 0.005 of 196 patches moves none"),
    ],
)
def test_values_that_cannot_be_run_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scenario(values)


def all_configs() -> dict[str, type[Config]]:
    registries: tuple[Registry[Any], ...] = (ATTACKS, DEFENCES, SERVERS)
    for registry in registries:
        for name in registry:
            registry.get(name)
    waiting, configs = [Config, Campaign, Policy, DeploymentConfig, TrainingConfig], dict[str, type[Config]]()
    while waiting:
        config = waiting.pop()
        configs[f"{config.__module__}.{config.__qualname__}"] = config
        waiting += [child for child in config.__subclasses__() if child.__module__.startswith("fedmjp.")]
    return configs


def test_no_number_of_any_configuration_is_true_or_false() -> None:
    """YAML reads yes, no, on and off as these, and Python takes them for 1 and 0."""
    numbers = 0
    for config in all_configs().values():
        for name, kind in config.model_fields.items():
            values = {int: True, float: False, int | None: True, float | None: True, tuple[int, ...]: [True]}
            if kind.annotation in values:
                numbers += 1
                with pytest.raises(ConfigError, match=f"{name}(.0)? = .*(true|false) is no number; .*: write a number"):
                    config.parse({name: values[kind.annotation]})
    assert numbers > 150


def test_scenarios_of_batches_refuse_training_and_pass_over_its_absence() -> None:
    with pytest.raises(ConfigError, match=r"use fedmjp\.TrainingScenario"):
        Scenario.parse({"training": SHORT})
    assert Scenario.parse({"training": None}) == Scenario()
    assert isinstance(parse_scenario({"training": SHORT}), TrainingScenario)


def test_scenarios_that_the_version_before_wrote_are_read() -> None:
    """It stated two options of steps where they were not used."""
    written = {**Scenario().model_dump(mode="json"), "local_momentum": 0.0, "local_batch_size": None}
    assert Scenario.parse(written) == Scenario()


@pytest.mark.parametrize("folder", ['with "quotes" and spaces', "größe/\U0001f431", "back\\slash"])
def test_any_path_survives_the_run_config_file(folder: str) -> None:
    run = make_run_config([Scenario(data=folder)], uploads_folder=folder)
    read = RunConfig.read(tomllib.loads(as_toml(run.flat())))
    assert read.uploads_folder == read_scenarios(read)[0].data == folder


def test_scenarios_survive_the_run_config() -> None:
    scenarios = (
        Scenario.parse({"model": "deit_tiny", "defences": ["mjp", "gaussian:noise=0.1"], "clients": 3, "seed": 7}),
        TrainingScenario.parse({"training": SHORT, "clients": 2, "defences": [{"name": "local_dp", "epsilon": 3}]}),
    )
    run = make_run_config(scenarios, upload_tensors=("x", "y"), share_sizes=(3, 4))
    assert all(isinstance(value, str | int | float | bool) for value in run.flat().values())
    read = RunConfig.read(run.flat())
    assert read == run
    assert read_scenarios(read) == scenarios


def test_without_scenarios_two_clients_use_mjp() -> None:
    (played,) = read_scenarios(RunConfig())
    assert (played.label, played.clients, played.rounds) == ("deit_small-mjp", 2, 1)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"modle": "deit_tiny"}]'])
def test_what_is_no_list_of_scenarios_is_told(text: str) -> None:
    with pytest.raises(ConfigError):
        read_scenarios(RunConfig(scenarios=text))


def test_what_follows_from_a_run_is_filled_in_where_nobody_said_it() -> None:
    scenario = Scenario.parse({"defences": ["local_dp"], "pictures_per_client": 2, "uploads_per_picture": 3})
    assert scenario.pipeline.defences[0].options.rounds == 6
    assert scenario.threat.pipeline.spent(6) is not None
    given = Scenario.parse({"defences": ["local_dp:rounds=9"], "pictures_per_client": 2})
    assert given.pipeline.defences[0].options.rounds == 9
    once = Scenario.parse({"defences": ["local_dp:rounds=1"], "pictures_per_client": 2})
    assert once.pipeline.defences[0].options.rounds == 1, "what says the default was said"
    batch = Scenario.parse({"defences": ["dp_sgd"], "pictures_per_client": 4, "batch_size": 4})
    assert batch.pipeline.defences[0].options.batch_size == 4


def test_a_training_run_plans_for_the_client_that_uploads_most() -> None:
    values = {
        "clients": 4,
        "training": {**SHORT, "participation": 0.5},
        "defences": ["local_dp", "secure_sum:clients=2"],
    }
    scenario = TrainingScenario.parse(values)
    drawn = [scenario.participants(each) for each in range(1, scenario.rounds + 1)]
    assert all(each in ([0, 1], [2, 3]) for each in drawn), "groups that are summed stay whole"
    most = max(sum(client in each for each in drawn) for client in range(4))
    assert scenario.planned(5).pipeline.defences[0].options.rounds == most < scenario.rounds
    single = {"clients": 1, "training": {**SHORT, "recipe": PLAIN, "local_epochs": 2}, "defences": ["dp_sgd"]}
    options = TrainingScenario.parse(single).planned(5).pipeline.defences[0].options
    assert (options.steps, options.steps_per_upload, options.batch_size) == (8 * 2 * 5, 2 * 5, PLAIN["batch_size"])


def test_digest_depends_on_every_value() -> None:
    base = ModelConfig(name="deit_tiny")
    changes = {
        "name": "deit_small",
        "unknown_embedding": True,
        "image_size": 32,
        "patch_size": 8,
        "classes": 10,
        "seed": 1,
    }
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
    assert "Of gaussian it is told the standard deviation" in ThreatModel.parse({"defences": "gaussian"}).sentence()
    assert "Of mjp it is told" in ThreatModel().sentence([Scenario.parse({"defences": "mjp"}).pipeline])
    assert " of 1 picture under label smoothing 0.1," in ThreatModel(label_smoothing=0.1).sentence()
    assert " pictures that the client mixed in pairs (mixup 0.8)," in ThreatModel(batch_size=2, mixup=0.8).sentence()
    cropped = ThreatModel(crop_scale=0.08).sentence()
    assert " of 1 picture, shown in random crops (8 % or more of each, flipped or not, drawn anew for each" in cropped
    assert " is told neither labels nor masks nor crops," in cropped
    assert "only the sum of 3 clients'" in ThreatModel.parse({"defences": "secure_sum:clients=3"}).sentence()


def test_the_digest_of_a_threat_model_depends_on_every_value() -> None:
    changes = {
        "uploads_per_picture": 2, "defences": "gaussian", "update": "delta", "batch_size": 2, "label_smoothing": 0.1,
        "mixup": 0.8, "crop_scale": 0.5,
    }  # fmt: skip
    digests = {ThreatModel.parse({name: value}).digest() for name, value in changes.items()}
    assert len(digests | {ThreatModel().digest()}) == 8


@pytest.mark.parametrize("text", ["benign,malignant", "[1, 2]", '{"benign": 0}', '"benign"', '["a", "b", "a"]'])
def test_names_of_classes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"class_names = .*(a JSON list of names|names the class 'a' twice)"):
        RunConfig.read({"class-names": text})


def test_names_of_classes_are_in_the_order_of_their_labels() -> None:
    assert RunConfig.read({"class-names": '["malignant", "benign"]'}).classes == ("malignant", "benign")
    assert RunConfig().classes == ()
