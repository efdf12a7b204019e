"""What must hold on CUDA as on the CPU; where there is no GPU, the same is tested on the CPU, with fewer attacks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fedmjp
from fedmjp.arithmetic import Arithmetic, computing, cuda_settings
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.linear_systems import minimum_norm, qr_by_cholesky, svd_by_eigenvectors
from fedmjp.attacks.testing import CHECKS, AttackTrial, adapts_to_what_it_claims
from fedmjp.config import ModelConfig
from fedmjp.data.loading import Batch
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.exchange import prepare_private
from fedmjp.learning import Learning, Recipe
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build, build_vit
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel
from fedmjp.training.loop import Schedule, Trainer
from tests.attacks import QUICK, THREATS, model_of
from tests.conftest import small_scenario

pytestmark = pytest.mark.cuda

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# On the CPU, tests/test_attacks.py and others try all of them.
TRIED = ["patch_embedding"]
if CUDA:  # without those that take another package, more than a server sees, or minutes
    left_out = ("breaching_", "oracle_", "mjp_span", "body_newton")
    TRIED = [name for name in ATTACKS if not name.startswith(left_out)]
OF_FEW = ("first_mlp", "network_degraded")  # take networks of few unknowns
IN_MINUTES = "network_degraded"  # recovers what it claims to with more steps than are taken here
EXACT = 80.0  # dB
# Relative difference of the gradients of two devices, which sum in another order.
ROUNDING = 2e-5


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def picture(pictures: Selection) -> LabelledPicture:
    return pictures.load(pictures.entries[0])


def relative(made: Tensor, truth: Tensor) -> float:
    truth = truth.double().cpu()
    return float((made.double().cpu() - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", TRIED)
def test_attacks_keep_their_contract(name: str, device: str) -> None:
    threat = THREATS.get(name, ThreatModel())
    small = {"model": "deit_micro", "patch_size": 16} if name.startswith(OF_FEW) else {"model": model_of(name)}
    # How much they leak is tested on the CPU; the best closed forms are held against that below.
    made = ATTACKS.get(name)(QUICK.get(name, {}))
    trial = AttackTrial(
        made, threat=threat, gain=None, tolerance=0.05 if made.optimises else 1e-3, device=device, **small
    )
    for check in CHECKS:
        if check is not adapts_to_what_it_claims or name != IN_MINUTES:
            check(trial)


@pytest.mark.parametrize("name", ["patch_embedding", "patch_embedding_wiener"])
def test_closed_forms_are_exact_in_float32_alone(name: str, device: str, picture: LabelledPicture) -> None:
    psnr: dict[Arithmetic, float] = {}
    arithmetics: list[Arithmetic] = ["float32", "bfloat16"]
    for arithmetic in arithmetics:
        scenario = small_scenario("deit_small", device=device, arithmetic=arithmetic)
        exchange = scenario.exchange([picture])
        made: Any = fedmjp.attack(name, exchange.upload, scenario)
        psnr[arithmetic] = float(metric("psnr").function(made.images, exchange.private.clean)[0])
    assert psnr["float32"] >= EXACT
    assert psnr["bfloat16"] < psnr["float32"] - 15


@pytest.mark.skipif(not CUDA, reason="TF32 is of CUDA")
def test_tf32_rounds_the_gradients_of_a_stack(device: str) -> None:
    scenario = Scenario.parse({"model": "deit_small", "device": device})
    model = build_vit(scenario.network).to(device)
    generator = torch.Generator().manual_seed(0)
    noise = [LabelledPicture(f"{place}", torch.rand(3, 224, 224, generator=generator), place) for place in range(4)]
    private, read = (
        [prepare_private(scenario, [each], 0) for each in noise],
        [names.POSITION_EMBEDDING, names.PATCH_WEIGHT],
    )
    arithmetics: list[Arithmetic] = ["float32", "tf32"]
    psnr: list[Tensor] = []
    for arithmetic in arithmetics:
        made = entrance_gradients(model, private, read, arithmetic=arithmetic)
        uploads = [Upload(gradients, "gradient", 1, 1, node, "") for node, gradients in enumerate(made)]
        found: Any = ATTACKS.get("patch_embedding")().run(uploads, model, scenario.threat, generator=generator)
        clean = torch.cat([batch.clean for batch in private])
        psnr.append(metric("psnr").function(torch.cat([each.images for each in found]), clean))
    assert bool((psnr[0] > 60).all())
    assert bool((psnr[1] < psnr[0] - 15).all())


@pytest.mark.parametrize(
    "values",
    [{}, {"defences": ["mjp"]}, {"update": "delta", "local_steps": 2, "local_learning_rate": 0.1}],
    ids=["gradient", "mjp", "delta"],
)
def test_an_upload_is_that_of_the_cpu(values: dict[str, Any], device: str, picture: LabelledPicture) -> None:
    there, here = (small_scenario(device=where, **values).exchange([picture]) for where in (device, "cpu"))
    assert torch.equal(there.private.mask, here.private.mask)
    assert there.upload.weights == here.upload.weights
    assert there.upload.tensors.keys() == here.upload.tensors.keys()
    whole = [
        torch.cat([one.upload.tensors[name].flatten().cpu() for name in here.upload.tensors]) for one in (there, here)
    ]
    assert relative(*whole) < ROUNDING


@pytest.mark.parametrize(
    "defence", ["gaussian:noise=0.01", "prune:kept=0.1", "quantise:bits=8", *(["soteria"] if CUDA else [])]
)
def test_a_defence_does_what_it_does_on_the_cpu(defence: str, device: str, picture: LabelledPicture) -> None:
    made = [small_scenario(device=where, defences=[defence]).exchange([picture]) for where in (device, "cpu")]
    there, here = (one.upload.tensors[names.PATCH_WEIGHT] for one in made)
    # A value on the edge of a step, or of what is kept, may fall to the other side.
    assert relative(there, here) < 0.01


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_a_stack_of_gradients_is_that_of_single_pictures(
    arithmetic: Arithmetic, device: str, pictures: Selection
) -> None:
    scenario = small_scenario("deit_tiny_april", device=device, arithmetic=arithmetic)
    model = build_vit(scenario.network).to(device)
    loaded = [pictures.load(entry) for entry in pictures.entries[:2]]
    read = [names.POSITION_EMBEDDING, names.PATCH_WEIGHT, names.PATCH_BIAS, names.FIRST_QKV_WEIGHT]
    private = [prepare_private(scenario, [each], 0) for each in loaded]
    stacked = entrance_gradients(model, private, read, arithmetic=arithmetic)
    for each, made in zip(loaded, stacked, strict=True):
        alone = scenario.exchange([each], model=model).upload.tensors
        for name in read:
            assert made[name].dtype == alone[name].dtype == torch.float32
            assert relative(made[name], alone[name]) < (ROUNDING if arithmetic == "float32" else 0.1)


def trainer(device: str, arithmetic: Arithmetic = "float32") -> Trainer:
    pipeline = read_pipeline(["mjp:mask_ratio=0.3"])
    values = {"name": "deit_micro", "image_size": 32, "patch_size": 4, "classes": 10, "localisation": "nonlinear"}
    network = pipeline.change_model(ModelConfig.parse(values))
    recipe = Recipe(epochs=2, warmup_epochs=0, batch_size=4, precision=arithmetic)
    return Trainer(build(network).to(device), Learning(recipe=recipe), pipeline, schedule=Schedule(2, 2), seed=0)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.rand(4, 3, 32, 32, generator=generator), torch.arange(4), (0, 1, 2, 3))


def test_a_training_step_is_that_of_the_cpu(device: str) -> None:
    (there, loss), (here, expected) = (trainer(where).gradient(batch(), 0, 0) for where in (device, "cpu"))
    assert loss == pytest.approx(expected, rel=1e-5)
    whole = [torch.cat([made[name].flatten().cpu() for name in here]) for made in (there, here)]
    assert relative(*whole) < ROUNDING


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_training_repeats_to_the_last_bit(device: str, arithmetic: Arithmetic) -> None:
    ended = []
    for _ in range(2):
        trained = trainer(device, arithmetic)
        reports = [trained.epoch(epoch, [batch(), batch()]) for epoch in range(2)]
        ended.append((reports[-1].loss, copy.deepcopy(trained.model.state_dict())))
    (loss, weights), (again, others) = ended
    assert loss == again
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_an_attack_that_searches_gives_what_it_gives_on_the_cpu(device: str, picture: LabelledPicture) -> None:
    psnr = []
    for where in (device, "cpu"):
        scenario = Scenario.parse(
            {"model": {"name": "deit_micro", "image_size": 32, "patch_size": 8}, "labels_known": True, "device": where}
        )
        small = LabelledPicture(picture.name, picture.image[:, ::2, ::2].contiguous(), picture.label)
        exchange = scenario.exchange([small])
        made: Any = fedmjp.attack("gradient_matching", exchange.upload, scenario, options={"iterations": 30})
        psnr.append(float(metric("psnr").function(made.images, exchange.private.clean)[0]))
    assert psnr[0] == pytest.approx(psnr[1], abs=0.5)


def test_factorisations_of_stacks_are_those_of_lapack(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tall = torch.randn(3, 40, 20, generator=generator, dtype=torch.float64)
    tall *= torch.logspace(0, -5, 20, dtype=torch.float64)  # as ill-conditioned as token gradients are
    tall[2, :, 7] = tall[2, :, 3]  # dependent: Cholesky's breaks down
    tall = tall.to(device)
    orthogonal, triangular = qr_by_cholesky(tall)
    eye = torch.eye(20, dtype=torch.float64, device=device)
    assert float((orthogonal.mT @ orthogonal - eye).abs().max()) < 1e-12
    assert relative(orthogonal @ triangular, tall) < 1e-14
    square = triangular[:2]
    left, singular, right = svd_by_eigenvectors(square)
    assert torch.allclose(singular, torch.linalg.svdvals(square), rtol=1e-5)
    assert relative(left * singular[:, None] @ right, square) < 1e-12
    assert minimum_norm(tall.mT, tall).device.type == device


def test_what_torch_was_told_holds_again_and_manifests_say_what_holds_between() -> None:
    before = (torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled())
    settings = cuda_settings()
    assert settings["matrix_products"] == settings["convolutions"] == "ieee"
    assert settings["deterministic_algorithms"]
    with computing("tf32", "cuda"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert (torch.backends.cuda.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()) == before
