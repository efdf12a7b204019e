"""Models without position embeddings, in both readings, and what may be attacked of them."""

import pytest
import torch

from attacks import ATTACKS
from attacks.patch_embedding import PatchEmbedding
from fedmjp.config import ModelConfig
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackNotApplicableError, BadInputError, ConfigError
from fedmjp.exchange import private_of_round
from fedmjp.models import names
from fedmjp.models.build import ARCHITECTURES, blueprint, build_vit, upload_bytes
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.settings import Picture
from fedmjp.stacked import ENTRANCE, entrance_gradients
from fedmjp.threat import ThreatModel
from fedmjp.updates import delta, gradient
from tests.attacks import THREATS
from tests.conftest import SMALL, small_model, small_scenario, upload_of

UNAFFECTED = {name for name in ATTACKS if name.startswith("breaching_")} - {"breaching_april"} | {"grey"}
UNAFFECTED |= {name for name in ATTACKS if ATTACKS.get(name).reveals != "pictures"}  # they read the last layers
UNAFFECTED |= {"token_imprint"}  # its server refuses such a model


@pytest.fixture(scope="module")
def batch() -> PrivateBatch:
    scenario = small_scenario(defences="jigsaw", pictures_per_client=2, batch_size=2)
    return private_of_round(scenario, select_for(scenario), 0, 1)


def config_of(name: str, defence: str = "none", **values: int) -> ModelConfig:
    return ModelConfig.parse({"name": name, "unknown_embedding": defence == "mjp", **SMALL, **values})


@pytest.mark.parametrize("april", ["", "_april"])
@pytest.mark.parametrize("variant", ["zero_positions", "without_positions"])
def test_all_other_weights_are_those_of_the_base_model(variant: str, april: str) -> None:
    base, changed = small_model(f"deit_tiny{april}").state_dict(), small_model(f"deit_tiny_{variant}{april}")
    others = {name: weight for name, weight in changed.named_parameters() if name != names.POSITION_EMBEDDING}
    assert others.keys() == base.keys() - {names.POSITION_EMBEDDING}
    for name, weight in others.items():
        assert torch.equal(weight, base[name]), name


def test_both_readings_compute_the_base_models_logits_without_positions(generator: torch.Generator) -> None:
    images, base = torch.rand(2, 3, 64, 64, generator=generator), small_model()
    with torch.no_grad():
        base.backbone.pos_embed.zero_()
        expected = base(images)
        for variant in ("zero_positions", "without_positions"):
            assert torch.equal(small_model(f"deit_tiny_{variant}")(images), expected)


def test_only_one_reading_uploads_a_position_gradient(batch: PrivateBatch) -> None:
    zero, absent = small_model("deit_tiny_zero_positions"), small_model("deit_tiny_without_positions")
    shown, hidden = gradient(zero, batch), gradient(absent, batch)
    assert shown.keys() - hidden.keys() == {names.POSITION_EMBEDDING}
    assert bool((shown[names.POSITION_EMBEDDING][0].abs().sum(1) > 0).all()), "a row per token"
    assert names.POSITION_EMBEDDING not in delta(absent, batch, steps=1, learning_rate=0.1)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "positions" in name])
def test_mjp_has_nothing_to_replace_where_no_position_embedding_is_learned(name: str) -> None:
    for make in (build_vit, blueprint):
        with pytest.raises(ConfigError, match=f"{name} has no learned position embedding"):
            make(config_of(name, "mjp"))
    assert not build_vit(small_scenario(name, defences="jigsaw").network).defended


def test_jigsaw_without_its_unknown_embedding_is_the_undefended_network(undefended: VitClassifier) -> None:
    jigsaw = build_vit(small_scenario(defences="jigsaw").network)
    assert not jigsaw.defended
    assert all(torch.equal(a, b) for a, b in zip(jigsaw.parameters(), undefended.parameters(), strict=True))


@pytest.mark.parametrize("name", ["deit_tiny_zero_positions", "deit_tiny_zero_positions_april"])
def test_stacked_gradients_of_zero_positions_equal_the_plain_ones(name: str, batch: PrivateBatch) -> None:
    model = small_model(name)
    wanted = [each for each, _ in model.named_parameters() if each in ENTRANCE]
    assert names.POSITION_EMBEDDING in wanted
    stacked, plain = entrance_gradients(model, [batch], wanted)[0], gradient(model, batch)
    for each in wanted:
        assert (stacked[each] - plain[each]).norm() <= 1e-5 * plain[each].norm(), each


def test_the_entrance_of_a_model_without_positions_is_refused(batch: PrivateBatch) -> None:
    with pytest.raises(BadInputError, match="take whole updates"):
        entrance_gradients(small_model("deit_tiny_without_positions"), [batch], [names.PATCH_WEIGHT])


@pytest.mark.parametrize("attack", list(ATTACKS))
@pytest.mark.parametrize("name", ["deit_tiny_without_positions", "deit_tiny_without_positions_april"])
def test_what_reads_the_position_gradient_refuses_a_model_without(attack: str, name: str) -> None:
    reason = ATTACKS.get(attack)().refusal(blueprint(config_of(name)), THREATS.get(attack, ThreatModel()))
    if attack in UNAFFECTED:
        assert reason is None
    else:
        assert reason is not None
        assert "has no position embedding, so that no upload shows the gradients at the tokens" in reason


def test_the_floor_runs_where_nothing_shows_the_tokens(generator: torch.Generator) -> None:
    scenario = small_scenario()
    private = private_of_round(scenario, select_for(scenario), 0, 1)
    model = small_model("deit_tiny_without_positions")
    upload = upload_of(model, private)
    made = ATTACKS.get("grey")().reconstruct([upload], model, ThreatModel(), generator=generator)
    assert made[0].images.shape == (1, 3, 64, 64)
    with pytest.raises(AttackNotApplicableError, match="has no position embedding"):
        ATTACKS.get("patch_embedding")().reconstruct([upload], model, ThreatModel(), generator=generator)


@pytest.mark.parametrize("size", [{"image_size": 64, "patch_size": 8}, {"image_size": 224, "patch_size": 8}])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith("deit_tiny")])
def test_a_blueprint_is_refused_for_the_same_reasons_as_the_model(name: str, size: dict[str, int]) -> None:
    defences = ("none",) if "positions" in name else ("none", "mjp")
    for config in [config_of(name, defence, **size) for defence in defences]:
        drawn, real = blueprint(config), build_vit(config)
        for threat in (ThreatModel(), ThreatModel(batch_size=2), ThreatModel(defences="secure_sum:clients=2")):
            for attack in [ATTACKS.get(each)() for each in ATTACKS]:
                assert attack.refusal(drawn, threat) == attack.refusal(real, threat), attack.name


@pytest.mark.parametrize("name", ["deit_tiny", "deit_tiny_without_positions_april"])
def test_a_blueprint_has_the_shapes_of_the_model_and_no_weights(name: str) -> None:
    config, before = config_of(name), torch.random.get_rng_state()
    drawn, real = blueprint(config), build_vit(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {each: tuple(p.shape) for each, p in drawn.named_parameters()} == {
        each: tuple(p.shape) for each, p in real.named_parameters()
    }
    assert all(parameter.is_meta for parameter in drawn.parameters())
    assert upload_bytes(config) == sum(weight.nbytes for weight in real.state_dict().values())


def test_equal_patches_without_positions_are_recovered_all_the_same(generator: torch.Generator) -> None:
    """Equal tokens have equal gradients: the system has no unique solution, the one of minimum norm is right."""
    model = small_model("deit_tiny_zero_positions")
    image = torch.rand(1, 3, 64, 64, generator=generator)
    image[..., :8, :16] = 0.25  # two equal patches
    nothing = torch.zeros(1, 64, dtype=torch.bool)
    batch = PrivateBatch(
        image, image, nothing, torch.arange(64)[None], torch.zeros(1, dtype=torch.int64), ("one",), Picture.CLEAN
    )
    (made,) = PatchEmbedding().reconstruct(
        [upload_of(model, batch)], model, ThreatModel(), generator=torch.Generator().manual_seed(0)
    )
    assert float((made.images - image).abs().max()) < 1e-3
