"""Attacks of the breaching library: equal to its own runs, and kept to our contract."""

import copy
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedmjp.attacks import breaching_adapter as adapter
from fedmjp.attacks.breaching_adapter import BreachingAttack
from fedmjp.attacks.breaching_case import Case, case_of
from fedmjp.config import ModelConfig
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, ConfigError
from fedmjp.metrics import METRICS
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import local_update
from tests.conftest import ROOT

OPTIMISATIONS = [
    adapter.DeepLeakage,
    adapter.InvertingGradients,
    adapter.Modern,
    adapter.SeeThroughGradients,
    adapter.Tag,
    adapter.Wei,
    adapter.BeyondInfering,
    adapter.Legacy,
    adapter.ClsAttack,
]
JOINT = {adapter.DeepLeakage, adapter.Tag}
KNOWN = ThreatModel(labels_known=True)
SIZE = {"image_size": 32, "patch_size": 8, "classes": 10}  # second derivatives of sixteen patches, not of sixty-four


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small only wait for each other when they are shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def one_block(name: str = "deit_tiny", defence: str = "none") -> VitClassifier:
    model = build_vit(ModelConfig.parse({"name": name, "unknown_embedding": defence == "mjp", **SIZE}))
    del model.backbone.blocks[1:]
    return model


@pytest.fixture(scope="module")
def model() -> VitClassifier:
    return one_block()


@pytest.fixture(scope="module")
def breaching() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import breaching
    return breaching


def private(count: int = 1) -> PrivateBatch:
    """Smooth pictures, each of another class."""
    coarse = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(7))
    clean = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    return PrivateBatch(
        clean=clean,
        shuffled=clean,
        mask=torch.zeros(count, 16, dtype=torch.bool),
        source=torch.arange(16).expand(count, -1),
        labels=torch.tensor([8, 3, 5, 1][:count]),
        pictures=tuple(map(str, range(count))),
        gradient_of=Picture.CLEAN,
    )


def upload_of(model: VitClassifier, batch: PrivateBatch, threat: ThreatModel = KNOWN) -> Upload:
    labels = tuple(batch.labels.tolist()) if threat.labels_known else None
    return Upload(local_update(model, batch, threat), threat.update, len(batch.pictures), 1, 0, "weights", labels)


def run(
    attack: BreachingAttack, upload: Upload, model: VitClassifier, threat: ThreatModel = KNOWN, seed: int = 0
) -> tuple[Reconstruction, list[float]]:
    """The reconstruction and the curve of losses."""
    curve: list[float] = []
    attack.on_progress = lambda done, total, loss: curve.append(loss)
    made = attack.run([upload], model, threat, generator=torch.Generator().manual_seed(seed))[0]
    return made, curve


def case(upload: Upload, model: VitClassifier, threat: ThreatModel, breaching: Any) -> Case:
    container = breaching.cases.models.model_preparation.VisionContainer
    return case_of(upload, model, threat, labels=sorted(upload.labels or ()), container=container)


@pytest.mark.parametrize("kind", OPTIMISATIONS, ids=lambda kind: kind.config_name)
def test_every_configuration_optimises_a_picture(kind: type[BreachingAttack], model: VitClassifier) -> None:
    upload = upload_of(model, private())
    steps: list[tuple[int, int]] = []
    attack = kind({"iterations": 3})
    attack.on_progress = lambda done, total, loss: steps.append((done, total))
    made = attack.run([upload], model, KNOWN, generator=torch.Generator())[0]
    assert made.images.shape == (1, 3, 32, 32)
    assert made.images.std() > 0
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert made.diagnostics["iterations"] == 3
    assert made.diagnostics["seconds"] > 0


@pytest.mark.parametrize("kind", OPTIMISATIONS, ids=lambda kind: kind.config_name)
def test_every_configuration_takes_the_delta_of_a_batch(kind: type[BreachingAttack], model: VitClassifier) -> None:
    threat = ThreatModel(update="delta", local_steps=2, batch_size=2)  # labels are recovered
    made, curve = run(kind({"iterations": 1}), upload_of(model, private(2), threat), model, threat)
    assert made.images.shape == (2, 3, 32, 32)
    assert len(curve) == 1


# breaching's own case: its user, its server, its attacker.


class Loader(list[dict[str, torch.Tensor]]):
    """What breaching's user reads its data from."""

    name = "pictures"


def their_case(
    breaching: Any, model: VitClassifier, batch: PrivateBatch, update: Mapping[str, Any] | None = None
) -> tuple[Any, list[Any], list[Any]]:
    """Model, payloads and shared data after breaching's own protocol."""
    count = len(batch.pictures)
    given = [f"user.num_data_points={count}", "user.provide_labels=True", "data.shape=[3,32,32]", "data.classes=10"]
    given += [f"user.{key}={value}" for key, value in (update or {}).items()]
    kind = "local_updates" if update else "local_gradient"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = breaching.get_case_config("2_single_imagenet", [f"user={kind}", *given])
    for key in ("mean", "std"):
        config.data[key] = getattr(model, key).flatten().tolist()
    container = breaching.cases.models.model_preparation.VisionContainer(copy.deepcopy(model.backbone)).eval()
    for module in container.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    setup = {"device": torch.device("cpu"), "dtype": model.mean.dtype}
    order = batch.labels.argsort()
    data = Loader([{"inputs": ((batch.clean - model.mean) / model.std)[order], "labels": batch.labels[order]}])
    loss = torch.nn.CrossEntropyLoss()
    users = breaching.cases.users
    user_type = users.UserMultiStep if update else users.UserSingleStep
    user = user_type(container, loss, data, setup, idx=0, cfg_user=config.user)
    server = breaching.cases.servers.HonestServer(container, loss, config, setup)
    shared, payloads, _ = server.run_protocol(user)
    return container, payloads, shared


def their_run(
    breaching: Any, attack: BreachingAttack, overrides: list[str], seed: int, theirs: tuple[Any, list[Any], list[Any]]
) -> tuple[torch.Tensor, list[float]]:
    container, payloads, shared = theirs
    setup = {"device": torch.device("cpu"), "dtype": torch.float32}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        config = breaching.get_attack_config(attack.config_name, overrides)
        attacker = breaching.attacks.prepare_attack(container, torch.nn.CrossEntropyLoss(), config, setup)
        torch.manual_seed(seed)  # noqa: TID251 (breaching takes no generator; state is restored)
        made, stats = attacker.reconstruct(payloads, shared, {})
    return made["data"], stats["Trial_0_Val"]


@pytest.mark.parametrize("kind", OPTIMISATIONS, ids=lambda kind: kind.config_name)
def test_same_seed_gives_the_loss_curve_and_picture_of_breachings_own_case(
    kind: type[BreachingAttack], model: VitClassifier, breaching: Any
) -> None:
    theirs = their_case(breaching, model, private(2))
    shared = theirs[2][0]
    labels = tuple(shared["metadata"]["labels"].tolist())
    if kind in JOINT:
        shared["metadata"]["labels"] = None
    named = dict(zip([name for name, _ in model.named_parameters()], shared["gradients"], strict=True))
    upload = Upload(named, "gradient", 2, 1, 0, "weights", labels)
    threat = ThreatModel(batch_size=2, labels_known=True)
    attack = kind({"iterations": 2})
    made, curve = run(attack, upload, model, threat)
    seed = attack._generator_for(upload, model, torch.Generator().manual_seed(0)).initial_seed()
    their_images, their_curve = their_run(breaching, attack, ["optim.max_iterations=2"], seed, theirs)
    assert curve == their_curve
    assert torch.equal(made.images, model.denormalise(their_images))


def test_same_seed_gives_the_loss_curve_of_breachings_own_local_steps(model: VitClassifier, breaching: Any) -> None:
    recipe = {"num_local_updates": 3, "num_data_per_local_update_step": 2, "local_learning_rate": 0.01}
    theirs = their_case(breaching, model, private(2), recipe)
    shared = theirs[2][0]
    named = dict(zip([name for name, _ in model.named_parameters()], shared["gradients"], strict=True))
    labels = tuple(shared["metadata"]["labels"].tolist())
    threat = ThreatModel(update="delta", local_steps=3, local_learning_rate=0.01, batch_size=2, labels_known=True)
    upload = Upload(named, "delta", 2, 1, 0, "weights", labels)
    attack = adapter.InvertingGradients({"iterations": 3})
    _, curve = run(attack, upload, model, threat)
    seed = attack._generator_for(upload, model, torch.Generator().manual_seed(0)).initial_seed()
    assert curve == their_run(breaching, attack, ["optim.max_iterations=3"], seed, theirs)[1]


@pytest.mark.parametrize("update", ["gradient", "delta"])
def test_our_client_uploads_what_breachings_user_uploads(update: str, model: VitClassifier, breaching: Any) -> None:
    # In double precision: a float32 delta of a weight may differ by that weight's last bit, which is much of it.
    precise, batch = copy.deepcopy(model).double(), private(2)
    steps = 1 if update == "gradient" else 3
    threat = ThreatModel(update=update, local_steps=steps, batch_size=2)
    recipe = {"num_local_updates": 3, "num_data_per_local_update_step": 2, "local_learning_rate": 0.01}
    _, _, shared = their_case(breaching, precise, batch, recipe if update == "delta" else None)
    ours = local_update(precise, batch, threat)
    for (name, tensor), theirs in zip(ours.items(), shared[0]["gradients"], strict=True):
        assert torch.allclose(tensor, theirs, rtol=1e-9, atol=1e-11 * tensor.abs().max().item()), name


@pytest.mark.parametrize("kind", [adapter.SeeThroughGradients, adapter.Tag], ids=lambda kind: kind.config_name)
def test_same_seed_gives_the_same_curve_and_another_seed_another(
    kind: type[BreachingAttack], model: VitClassifier
) -> None:
    upload = upload_of(model, private())
    first, again, other = (run(kind({"iterations": 2}), upload, model, seed=seed)[1] for seed in (0, 0, 1))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "threat",
    [
        ThreatModel(batch_size=4, labels_known=True),
        ThreatModel(update="delta", local_steps=3, local_learning_rate=0.05, batch_size=2, labels_known=True),
    ],
    ids=["gradient", "delta"],
)
def test_breachings_loss_vanishes_at_the_true_pictures_alone(
    threat: ThreatModel, model: VitClassifier, breaching: Any
) -> None:
    batch = private(threat.batch_size)
    given = case(upload_of(model, batch, threat), model, threat, breaching)
    about = given.shared["metadata"]
    objective = breaching.attacks.auxiliaries.objectives.CosineSimilarity()
    config = SimpleNamespace(mixed_precision=False)
    objective.initialize(torch.nn.CrossEntropyLoss(), config, about["local_hyperparams"])

    def loss(images: torch.Tensor) -> float:
        normalised = (images - model.mean) / model.std
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(objective(given.network, given.shared["gradients"], normalised, about["labels"])[0])

    true = batch.clean[batch.labels.argsort()]
    assert loss(true) < 1e-5
    assert loss(torch.rand(true.shape, generator=torch.Generator().manual_seed(0))) > 0.1


def test_recovered_labels_do_what_known_ones_do(model: VitClassifier) -> None:
    batch = private(4)
    curves = []
    for known in (True, False):
        threat = ThreatModel(batch_size=4, labels_known=known)
        curves.append(
            run(adapter.InvertingGradients({"iterations": 1}), upload_of(model, batch, threat), model, threat)
        )
    assert torch.equal(curves[0][0].images, curves[1][0].images)


def test_metric_of_breaching_agrees_on_the_result(model: VitClassifier, breaching: Any) -> None:
    batch = private(2)
    threat = ThreatModel(batch_size=2, labels_known=True)
    made, _ = run(adapter.Legacy({"iterations": 2}), upload_of(model, batch, threat), model, threat)
    mean, best = breaching.analysis.metrics.psnr_compute(made.images, batch.clean)
    ours = METRICS["psnr"].function(made.images, batch.clean)
    assert ours.mean().item() == pytest.approx(mean, rel=1e-5)
    assert ours.max().item() == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_april_is_breachings_closed_form(dtype: str, breaching: Any) -> None:
    model = one_block("deit_tiny_april")
    upload = upload_of(model, private())
    made, _ = run(adapter.AprilAnalytic({"impl.dtype": dtype}), upload, model)
    gradients = [None, upload.tensors[names.POSITION_EMBEDDING], None, None, upload.tensors[names.FIRST_QKV_WEIGHT]]
    april = breaching.attacks.analytic_attack.AprilAttacker
    patches = april.closed_form_april(SimpleNamespace(model=model.backbone), {"gradients": gradients})
    assert torch.allclose(made.images[0], model.denormalise(april.recover_patch(patches)).float(), atol=1e-5)


# Options.


def test_overrides_reach_breachings_configuration(model: VitClassifier) -> None:
    options = {"iterations": 7, "restarts": "2", "optim.step_size": "0.05", "optim.boxed": False, "optim.signed": None}
    config = adapter.Modern(options).config
    assert config.optim.max_iterations == 7
    assert config.restarts.num_trials == 2
    assert (config.optim.step_size, config.optim.boxed, config.optim.signed) == (0.05, False, None)
    assert config.regularization.total_variation.scale == 0.1
    upload = upload_of(model, private())
    plain, bent = (
        run(adapter.InvertingGradients({"iterations": 2, **more}), upload, model)[1]
        for more in ({}, {"regularization.total_variation.scale": 0.4})
    )
    assert plain[0] < bent[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim.stepsize": 1}, "unknown key 'optim.stepsize', did you mean 'optim.step_size'?"),
        ({"iteration": 1}, "unknown key 'iteration', did you mean 'iterations'?"),
        ({"iterations": 0}, "iterations = 0: "),
        ({"seconds": 0}, "seconds = 0: "),
        ({"iterations": 2, "optim.max_iterations": 3}, "iterations and optim.max_iterations are the same option"),
        ({"optim.step_size": "[1"}, r"optim.step_size=\[1: "),
        ({"attack_type": "multiscale"}, "must be one of optimization, joint-optimization"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_at_once(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapter.Modern(options)


def test_april_has_no_iterations() -> None:
    with pytest.raises(ConfigError, match="unknown key 'iterations'"):
        adapter.AprilAnalytic({"iterations": 1})


def test_digest_of_options_covers_overrides() -> None:
    plain, bent = adapter.Modern(), adapter.Modern({"optim.step_size": 0.2})
    assert plain.options.digest() != bent.options.digest()


def test_deep_leakage_can_be_given_labels(model: VitClassifier) -> None:
    options = {"attack_type": "optimization", "iterations": 1}
    _, curve = run(adapter.DeepLeakage(options), upload_of(model, private()), model)
    assert len(curve) == 1


def test_label_strategy_of_breaching_is_used_for_unknown_labels(model: VitClassifier) -> None:
    threat = ThreatModel(batch_size=2)
    attack = adapter.InvertingGradients({"iterations": 1, "label_strategy": "random"})
    upload = upload_of(model, private(2), threat)
    guessed, recovered = (
        run(each, upload, model, threat)[1] for each in (attack, adapter.InvertingGradients({"iterations": 1}))
    )
    assert guessed != recovered
    known = ThreatModel(labels_known=True)
    assert "leave it out" in (attack.refusal(model, known) or "")
    assert "leave it out" in (attack.refusal(model, ThreatModel(update="delta")) or "")


def test_time_budget_ends_with_the_best_so_far(model: VitClassifier) -> None:
    attack = adapter.InvertingGradients({"seconds": 0.3, "restarts": 3})  # 24 000 iterations otherwise
    made, curve = run(attack, upload_of(model, private()), model)
    assert 1 <= len(curve) < 200
    assert made.diagnostics["trials"] == 1
    assert made.diagnostics["loss"] == min(curve)
    assert made.images.std() > 0


def test_restarts_keep_the_best_trial(model: VitClassifier) -> None:
    upload = upload_of(model, private())
    made, curve = run(adapter.ClsAttack({"iterations": 2, "restarts": 3}), upload, model)
    assert made.diagnostics["trials"] == 3
    assert len(curve) == 6
    assert made.diagnostics["loss"] in [min(curve[start : start + 2]) for start in (0, 2, 4)]


def test_restarts_of_a_joint_attack_are_judged_with_the_labels_they_found(
    model: VitClassifier, monkeypatch: pytest.MonkeyPatch, breaching: Any
) -> None:
    found: list[int] = []
    judged: list[int] = []
    joint = breaching.attacks.optimization_with_label_attack.OptimizationJointAttacker
    trial, score = joint._run_trial, joint._score_trial

    def noted_trial(*args: Any) -> Any:
        data, labels = trial(*args)
        found.extend(labels.argmax(dim=-1).tolist())
        return data, labels

    def noted_score(self: Any, candidate: Any, labels: torch.Tensor, *rest: Any) -> Any:
        judged.extend(labels.tolist())
        return score(self, candidate, labels, *rest)

    monkeypatch.setattr(joint, "_run_trial", noted_trial)
    monkeypatch.setattr(joint, "_score_trial", noted_score)
    run(adapter.Tag({"iterations": 2, "restarts": 2}), upload_of(model, private()), model)
    assert len(judged) == 2
    assert judged == found


def test_joint_attack_optimises_labels_behind_local_steps_too(
    model: VitClassifier, monkeypatch: pytest.MonkeyPatch, breaching: Any
) -> None:
    slopes: list[float] = []
    joint = breaching.attacks.optimization_with_label_attack.OptimizationJointAttacker
    objective = joint._compute_objective

    def noted(self: Any, candidate: Any, labels: torch.Tensor, *rest: Any) -> Any:
        closure = objective(self, candidate, labels, *rest)

        def watched() -> Any:
            value = closure()
            slopes.append(labels.grad.abs().max().item())
            return value

        return watched

    monkeypatch.setattr(joint, "_compute_objective", noted)
    threat = ThreatModel(update="delta", local_steps=2, batch_size=2)
    run(adapter.Tag({"iterations": 2}), upload_of(model, private(2), threat), model, threat)
    assert len(slopes) == 2
    assert min(slopes) > 0


# Trials that break.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective.scale": 1e39}, "Recovery loss is non-finite in iteration 0"),
        ({"init": "nonsense"}, "ValueError: Unknown initialization scheme nonsense given"),
        ({"restarts.scoring": "TV"}, "TypeError: .*missing 1 required positional argument: 'setup'"),
    ],
    ids=["nan", "init", "scoring"],
)
def test_broken_trial_is_an_error_with_breachings_message(
    options: Mapping[str, Any], message: str, model: VitClassifier
) -> None:
    attack = adapter.InvertingGradients({"iterations": 1, **options})
    with pytest.raises(AttackFailedError, match=f"breaching_invertinggradients: .*{message}"):
        run(attack, upload_of(model, private()), model)


def test_fused_attention_left_on_would_be_an_error(model: VitClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedmjp.attacks.breaching_case as module

    monkeypatch.setattr(module, "twice_differentiable", copy.deepcopy)
    with pytest.raises(AttackFailedError, match="RuntimeError: derivative for aten::_scaled_dot_product"):
        run(adapter.InvertingGradients({"iterations": 1}), upload_of(model, private()), model)


@pytest.mark.parametrize("where", ["step", "objective", "score"])
def test_interrupt_by_the_user_is_not_swallowed(
    where: str, model: VitClassifier, monkeypatch: pytest.MonkeyPatch, breaching: Any
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    attackers = breaching.attacks.optimization_based_attack
    target = {
        "step": (torch.optim.Adam, "step"),
        "objective": (attackers.CosineSimilarity, "gradient_based_loss"),
        "score": (attackers.OptimizationBasedAttacker, "_score_trial"),
    }[where]
    monkeypatch.setattr(*target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(adapter.InvertingGradients({"iterations": 2}), upload_of(model, private()), model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_error_of_the_progress_display_is_not_breachings(error: type[BaseException], model: VitClassifier) -> None:
    def fail(done: int, total: int, loss: float) -> None:
        raise error

    attack = adapter.InvertingGradients({"iterations": 2})
    attack.on_progress = fail
    with pytest.raises(error):
        attack.run([upload_of(model, private())], model, KNOWN, generator=torch.Generator())


# What must be left as it was.


@pytest.fixture
def hydra_application() -> Iterator[Callable[[], Any]]:
    """An application that has Hydra initialised for itself."""
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    adapter._composed.cache_clear()  # what was composed before leaves Hydra alone anyway
    with initialize_config_module("breaching.config.case", version_base="1.3"):
        yield lambda: GlobalHydra.instance().hydra


def test_nothing_but_the_result_is_left_behind(
    model: VitClassifier,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    hydra_application: Callable[[], Any],
) -> None:
    from hydra.version import getbase

    caplog.set_level(logging.INFO)
    logger = logging.getLogger("breaching")
    upload = upload_of(model, private())
    tensors = copy.deepcopy(dict(upload.tensors))
    weights = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    before = (logger.level, logger.propagate, list(logger.handlers), hydra_application(), getbase())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(adapter.Modern({"iterations": 2, "seconds": 1e-9, "normalize_gradients": True}), upload, model)
        run(adapter.DeepLeakage({"iterations": 1}), upload, model)
    assert (logger.level, logger.propagate, list(logger.handlers), hydra_application(), getbase()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(upload.tensors[name], tensors[name]) for name in tensors)
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert model.backbone.blocks[0].attn.fused_attn
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not any("print" in vars(module) for name, module in sys.modules.items() if name.startswith("breaching"))
    assert capsys.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("breaching")]


def test_listing_the_attacks_does_not_import_breaching() -> None:
    code = "import sys, fedmjp.attacks.breaching_adapter; assert not {'breaching', 'hydra'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# What they refuse, and say.


def test_sums_of_updates_are_refused(model: VitClassifier) -> None:
    summed = ThreatModel(defences="secure_sum:clients=2")
    assert "each client's own update" in (adapter.Modern().refusal(model, summed) or "")


@pytest.mark.parametrize(
    ("name", "threat", "message"),
    [
        ("deit_tiny", ThreatModel(), "take the model's _april variant"),
        ("deit_tiny_april", ThreatModel(batch_size=2), "not a gradient of 2"),
        ("deit_tiny_april", ThreatModel(update="delta"), "not a delta of 1"),
    ],
)
def test_april_refuses_what_it_cannot_invert(name: str, threat: ThreatModel, message: str) -> None:
    assert message in (adapter.AprilAnalytic().refusal(one_block(name), threat) or "")


def test_unknown_labels_need_the_bias_of_the_head(model: VitClassifier, threat: ThreatModel) -> None:
    upload = upload_of(model, private(), threat)
    reduced = Upload(
        {name: tensor for name, tensor in upload.tensors.items() if name != names.HEAD_BIAS}, "gradient", 1, 1, 0, "w"
    )
    with pytest.raises(AttackNotApplicableError, match=names.HEAD_BIAS):
        run(adapter.Modern(), reduced, model, threat)


@pytest.mark.parametrize("kind", [*OPTIMISATIONS, adapter.AprilAnalytic], ids=lambda kind: kind.config_name)
def test_caveat_says_that_the_defence_is_not_modelled(kind: type[BreachingAttack], model: VitClassifier) -> None:
    assert "naive" in (kind().caveat(one_block(defence="mjp"), KNOWN) or "")
    assert "naive" not in (kind().caveat(model, KNOWN) or "")


def test_defended_model_is_run_without_its_unknown_embedding() -> None:
    defended = one_block(defence="mjp")
    upload = upload_of(defended, private())
    attack = adapter.InvertingGradients({"iterations": 1})
    assert names.UNKNOWN_EMBEDDING not in attack.tensors(defended)
    assert run(attack, upload, defended)[0].images.shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("optim.step_size", "abc", "must be a finite number"),
        ("optim.step_size", "nan", "must be a finite number"),
        ("optim.max_iterations", "0", "must be at least 1"),
        ("restarts.num_trials", "0", "must be at least 1"),
        ("optim", "foo", "is a group of keys; set optim"),
    ],
)
def test_values_that_breaching_would_choke_on_are_refused_at_once(key: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        adapter.InvertingGradients({key: value})
