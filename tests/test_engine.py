"""The engine in direct mode: everything is run once, whatever fails."""

import shutil
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedmjp.attacks.patch_embedding import PatchEmbeddingAttack
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running.engine import Engine, jobs
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import Recorder, run_experiment, run_local
from fedmjp.benchmarks.uploads import direct
from fedmjp.benchmarks.uploads.direct import DirectUploads
from fedmjp.benchmarks.uploads.source import Batch, RecordedUploads
from fedmjp.data.selection import select_for
from fedmjp.errors import OUT_OF_MEMORY, FederationError
from fedmjp.exchange import Exchange
from fedmjp.metrics import COLOUR
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload, weights_digest
from fedmjp.scenario import Scenario
from fedmjp.threat import ThreatModel
from tests.experiments import (
    Told,
    planned,
    record_directly,
    rows,
    run,
    run_small,
    small_campaign,
    small_experiments,
)

TRIALS = 96  # 2 models x 2 defences x 2 attacks x 3 settings x 4 pictures
ONE = {"deit_tiny": "patch_embedding"}  # model and its attack, where the other one would show nothing else


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> OutputFolder:
    output = OutputFolder(tmp_path_factory.mktemp("engine"))
    run_small(output.root)
    return output


def stored(output: OutputFolder, plan: TrialPlan) -> Sequence[TrialResult]:
    return Store.at(output.database).trials([trial.key for trial in plan.tasks])


def test_every_trial_is_finished_and_scored(finished: OutputFolder) -> None:
    trials = stored(finished, planned(small_experiments()))
    assert len(trials) == TRIALS
    assert {trial.status for trial in trials} == {"ok"}
    for trial in trials:
        assert set(trial.scores) == {"mse", "psnr", "ssim", "fft2d", "lpips_alex", COLOUR}
        assert trial.weights_sha256
        assert 0 < (trial.realised_ratio or 0) <= 0.27 or trial.defence == "none"


def test_closed_form_leaks_undefended_and_not_naively_against_mjp(finished: OutputFolder) -> None:
    psnr: dict[tuple[str, str], list[float]] = {}
    for trial in stored(finished, planned(small_experiments())):
        if trial.attack == "patch_embedding":
            psnr.setdefault((trial.defence, trial.setting), []).append(trial.scores["psnr"])
    assert min(psnr["none", "a"]) > 60
    assert min(psnr["jigsaw", "b"]) > 60
    assert max(psnr["jigsaw", "c"]) < 40
    assert max(psnr["mjp", "b"]) < 30


def test_pictures_are_on_disk_and_the_records_of_the_run_are_gone(finished: OutputFolder) -> None:
    originals = 4 * 2 * 2  # as they are and as they went in, of scenarios that shuffle and of those that do not
    assert len(list(finished.pictures.rglob("*.png"))) == originals + 8 * 2 * 4
    assert not finished.run.root.exists()


def never(scenarios: Sequence[Scenario], folder: RunFolder, **_: object) -> None:
    raise AssertionError("nothing is missing, so nothing may run")


def test_a_second_run_finds_everything_done(finished: OutputFolder) -> None:
    run(planned(small_experiments()), finished, never)


def test_fresh_forgets_trials_and_pictures_and_keeps_what_others_put_there(
    finished: OutputFolder, tmp_path: Path
) -> None:
    output = OutputFolder(tmp_path)
    shutil.copytree(finished.root, tmp_path, dirs_exist_ok=True)
    (tmp_path / "notes.txt").touch()
    output.prepare(fresh=True)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", ".fedmjp"}


def test_a_failed_federation_becomes_rows_and_is_tried_again(tmp_path: Path) -> None:
    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)

    def half(
        scenarios: Sequence[Scenario], folder: RunFolder, *, upload_tensors: Sequence[str], on_round: Callable[[], None]
    ) -> None:
        record_directly(scenarios, folder, upload_tensors=upload_tensors, on_round=on_round)
        for upload in folder.uploads.rglob("*-node-1.safetensors"):
            upload.unlink()
        raise FederationError("client 1: ValueError: broken")

    run(plan, output, half)
    trials = stored(output, plan)
    assert sorted(trial.status for trial in trials) == ["failed"] * (TRIALS // 4) + ["ok"] * (TRIALS // 4)
    assert {trial.error for trial in trials if trial.status == "failed"} == {"client 1: ValueError: broken"}

    run(plan, output)
    assert {trial.status for trial in stored(output, plan)} == {"ok"}


def test_a_refused_attack_has_no_trials_and_stops_nothing(tmp_path: Path) -> None:
    experiments = small_experiments(models={"deit_tiny": "april"})
    plan, output = planned(experiments), OutputFolder(tmp_path)
    run(plan, output)
    trials = stored(output, plan)
    assert len(trials) == 2 * 3 * 4
    assert {(trial.attack, trial.status) for trial in trials} == {("grey", "ok")}


def test_jobs_of_the_same_weights_follow_each_other_and_cover_what_is_missing(tmp_path: Path) -> None:
    plan, setup = small_campaign(tmp_path)
    store = setup.store()
    found = jobs(plan)
    assert sorted(trial.key for job in found for trial in job.trials) == sorted(trial.key for trial in plan.tasks)
    arms = [arm for arm, _ in groupby(job.arm for job in found)]
    assert len(arms) == len(set(arms)) == 4, "two seeds with and without MJP"
    for job in found:
        assert {trial.arm for trial in job.trials} == {job.arm}
        assert all(trial in plan.parts[job.part].trials for trial in job.trials)
    experiment = setup.experiments[found[0].part]
    source = DirectUploads(experiment, setup.selection)
    recorder = Recorder(setup.output, store, RunProgress())
    for results in Engine(experiment, source).results(found[0].trials):
        recorder.write(results)
    assert jobs(plan, store.finished([trial.key for trial in plan.tasks])) == found[1:]


def test_an_upload_does_not_depend_on_its_neighbours_to_the_last_bit(tmp_path: Path) -> None:
    plan, setup = small_campaign(tmp_path)
    batches = list(dict.fromkeys(trial.batch for trial in plan.tasks))
    for experiment in setup.experiments[:4]:
        source = DirectUploads(experiment, setup.selection)
        together = source.uploads(batches)
        for batch in batches:
            alone, same = source.uploads([batch])[batch], together[batch]
            assert isinstance(alone, Exchange)
            assert isinstance(same, Exchange)
            assert weights_digest(alone.upload.tensors) == weights_digest(same.upload.tensors)


def test_a_client_that_breaks_down_is_rows_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: VitClassifier, *_: object, **_options: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr("fedmjp.benchmarks.uploads.direct.entrance_gradients", broken)
    plan, setup = small_campaign(tmp_path, seeds=(0,))
    told = Told()
    run_local(plan, setup, workers=1, progress=told)
    found = rows(plan, setup).values()
    assert len(found) == told.done == len(plan.tasks)
    assert {row["status"] for row in found} == {"failed"}
    assert all(f"the client's update of {row['picture']} failed: {OUT_OF_MEMORY}" == row["error"] for row in found)


def test_any_error_of_an_attack_is_a_row_of_that_upload_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = PatchEmbeddingAttack.reconstruct_stack

    def sometimes(
        self: PatchEmbeddingAttack, uploads: Sequence[Upload], model: VitClassifier, threat: ThreatModel, **named: Any
    ) -> list[Reconstruction]:
        if any((upload.node, upload.server_round, model.defended) == (1, 1, False) for upload in uploads):
            raise ArithmeticError("did not converge")
        return solve(self, uploads, model, threat, **named)

    monkeypatch.setattr(PatchEmbeddingAttack, "reconstruct_stack", sometimes)
    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)
    run(plan, output)
    failed = [trial for trial in stored(output, plan) if trial.status == "failed"]
    assert {trial.error for trial in failed} == {"ArithmeticError: did not converge"}
    assert {(trial.attack, trial.model, trial.defence, trial.setting) for trial in failed} == {
        ("patch_embedding", "deit_tiny", "none", "a"),
        ("patch_embedding", "deit_tiny", "jigsaw", "b"),
        ("patch_embedding", "deit_tiny", "jigsaw", "c"),
    }
    assert len({trial.picture for trial in failed}) == 1


def test_an_interrupted_attack_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solve, calls = PatchEmbeddingAttack.reconstruct_stack, []

    def interrupted(
        self: PatchEmbeddingAttack, uploads: Sequence[Upload], *rest: Any, **named: Any
    ) -> list[Reconstruction]:
        calls.append(len(uploads))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return solve(self, uploads, *rest, **named)

    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PatchEmbeddingAttack, "reconstruct_stack", interrupted)
        patch.setattr(PatchEmbeddingAttack, "stack", 1)  # as an optimisation that takes one upload at a time
        with pytest.raises(KeyboardInterrupt):
            run(plan, output)
    kept = {trial.key for trial in stored(output, plan) if trial.status == "ok"}
    assert len(kept) == 2, "one setting of the two uploads before"
    run(plan, output)
    assert {trial.status for trial in stored(output, plan)} == {"ok"}


def test_what_an_attack_does_to_its_model_never_reaches_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 1)
    solve, seen = PatchEmbeddingAttack.reconstruct_stack, []

    def spying(
        self: PatchEmbeddingAttack, uploads: Sequence[Upload], model: VitClassifier, *rest: Any, **named: Any
    ) -> Any:
        model.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        made = solve(self, uploads, model, *rest, **named)
        model.backbone.patch_embed.proj.weight.data.zero_()
        return made

    monkeypatch.setattr(PatchEmbeddingAttack, "reconstruct_stack", spying)
    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)
    output.prepare(fresh=False)
    store = Store.at(output.database)
    for part in plan.parts:
        source = DirectUploads(part.experiment, select_for(part.experiment.scenario))
        run_experiment(Engine(part.experiment, source), part.trials, Recorder(output, store, RunProgress()))
    direct._attackers_model.cache_clear()  # other tests' attackers get theirs as it was sent
    assert seen == [], "no picture of a client passes through the attacker's model"
    psnr = [
        t.scores["psnr"]
        for t in stored(output, plan)
        if (t.attack, t.defence, t.setting) == ("patch_embedding", "none", "a")
    ]
    assert min(psnr) > 60, "the clients' weights are as they were"


def test_memory_holds_a_few_uploads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 2)
    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)
    asked: list[int] = []
    uploads = RecordedUploads.uploads

    def counted(self: RecordedUploads, batches: Sequence[Batch]) -> object:
        asked.append(len(batches))
        return uploads(self, batches)

    monkeypatch.setattr(RecordedUploads, "uploads", counted)
    run(plan, output)
    assert asked == [2] * (4 // 2) * 2 * 2, "two chunks of two versions with and without MJP"
    assert {trial.status for trial in stored(output, plan)} == {"ok"}


def test_damaged_records_are_rows_and_the_next_run_repairs_them(tmp_path: Path) -> None:
    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)

    def damaging(scenarios: Sequence[Scenario], folder: RunFolder, **named: Any) -> None:
        record_directly(scenarios, folder, **named)
        next(folder.uploads.rglob("round-*")).write_bytes(b"cut")

    run(plan, output, damaging)
    failed = [trial for trial in stored(output, plan) if trial.status == "failed"]
    assert 0 < len(failed) <= 6
    assert all("upload or private record is missing or damaged" in (trial.error or "") for trial in failed)
    run(plan, output)
    assert {trial.status for trial in stored(output, plan)} == {"ok"}


def test_missing_uploads_are_not_taken_for_a_completed_run(tmp_path: Path) -> None:
    plan, output = planned(small_experiments(models=ONE)), OutputFolder(tmp_path)

    def losing(scenarios: Sequence[Scenario], folder: RunFolder, **named: Any) -> None:
        record_directly(scenarios, folder, **named)
        next(folder.uploads.rglob("round-*")).unlink()

    run(plan, output, losing)
    errors = {trial.error for trial in stored(output, plan) if trial.status == "failed"}
    assert errors == {"the federated run completed, but 1 uploads are missing"}
    run(plan, output)
    assert {trial.status for trial in stored(output, plan)} == {"ok"}


def test_records_of_other_pictures_are_never_scored(tmp_path: Path) -> None:
    data = tmp_path / "data" / "class"
    data.mkdir(parents=True)

    def draw(seed: int) -> None:
        for index in range(4):
            pixels = np.random.RandomState(seed + index).randint(0, 256, (64, 64, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(data / f"{index}.png")

    def losing(scenarios: Sequence[Scenario], folder: RunFolder, **named: Any) -> None:
        record_directly(scenarios, folder, **named)
        shutil.rmtree(folder.uploads / "deit_tiny-mjp-mask_ratio=0.27")

    output = OutputFolder(tmp_path / "output")
    output.prepare(fresh=False)
    draw(0)
    run(planned(small_experiments(models=ONE, data=str(data.parent))), output, losing)
    assert output.run.root.exists(), "kept for the trials that failed"
    draw(100)
    plan = planned(small_experiments(models=ONE, data=str(data.parent)))
    recorded: list[Sequence[Scenario]] = []

    def again(scenarios: Sequence[Scenario], folder: RunFolder, **named: Any) -> None:
        recorded.append(scenarios)
        record_directly(scenarios, folder, **named)

    run(plan, output, again)
    assert len(recorded) == 1, "the pictures changed, so the records are stale"
    assert {trial.status for trial in stored(output, plan)} == {"ok"}
