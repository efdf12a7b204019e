"""`fedmjp evaluate` on corrupted pictures, ImageNet-A and ImageNet-O, of models that were not trained."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fedmjp.data.datasets import names_of_imagenet, open_dataset
from fedmjp.data.pictures import to_image
from fedmjp.evaluation import robustness
from fedmjp.evaluation.corruptions import corrupt, save_as_jpeg
from fedmjp.evaluation.natural import RestrictedPredictions, compute_aurra, detect, find_class_names
from fedmjp.evaluation.robustness import ALEXNET, read_hits, write_hits
from fedmjp.evaluation.robustness_report import RobustnessReport
from fedmjp.evaluation.runs import TrainedModel, open_run
from fedmjp.evaluation.severities import NAMES
from fedmjp.models.build import build
from fedmjp.seeds import numpy_generator
from tests.test_evaluate_command import BAD_INPUT, CLASSES, command, keep, training

PICTURES = 6


def folder_of_pictures(folder: Path, classes: list[str], *, seed: int, pictures: int = PICTURES) -> Path:
    generator = np.random.default_rng(seed)
    for index in range(pictures):
        place = folder / classes[index % len(classes)]
        place.mkdir(exist_ok=True, parents=True)
        smooth = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((40, 36))
        smooth.save(place / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    classes = [f"class{index}" for index in range(CLASSES)]
    return folder_of_pictures(tmp_path_factory.mktemp("pictures"), classes, seed=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for name, config in {"none": training(), "mjp": training(ratio=0.27)}.items():
        keep(root / name, config)
        (root / name / "classes.txt").write_text("class0\nclass1\nclass2\n")
    return root


def test_errors_are_those_of_the_corrupted_pictures(monkeypatch, capsys, tmp_path, data, runs):
    out = tmp_path / "out"
    options = ("--data", data, "--corruptions", "--device", "cpu", "--seed", 3, "--output", out)
    assert command(monkeypatch, runs / "none", runs / "mjp", *options) == 0
    errors = pd.read_csv(out / "corruptions.csv")
    assert len(errors) == 2 * len(NAMES) * 5
    about = json.loads((out / "evaluation.json").read_text())
    run = open_run(runs / "mjp")
    network, dataset = build(run.model).eval(), open_dataset(str(data), "validation", classes=CLASSES)
    for corruption, severity in (("snow", 4), ("glass_blur", 2)):
        wrong = 0
        for index in range(PICTURES):
            prepared = to_image(dataset.photograph(index), 32, crop_share=run.crop_share)
            pixels = (255 * prepared).round().byte().permute(1, 2, 0).numpy()
            draws = numpy_generator(3, "corruption", corruption, severity, dataset.key(index))
            shown = save_as_jpeg(corrupt(pixels, corruption, severity, draws))
            with torch.inference_mode():
                logits = network(torch.from_numpy(shown.copy()).permute(2, 0, 1)[None].float() / 255)
            wrong += int(logits.argmax()) != dataset.labels[index]
        row = errors.query("run == 'mjp' and corruption == @corruption and severity == @severity").iloc[0]
        assert (row["error"], row["pictures"]) == (pytest.approx(100 * wrong / PICTURES), PICTURES)
    for line in about["runs"]:
        by_corruption = errors[errors["run"] == line["run"]].groupby("corruption")["error"].mean()
        assert line["mce_unnormalised"] == pytest.approx(by_corruption.mean())
        assert line["mce"] == pytest.approx(np.mean([by_corruption[name] / ALEXNET[name] for name in NAMES]))
        low, high = line["mce_interval"]
        assert low <= line["mce"] <= high
        clean = pd.read_csv(out / "evaluation.csv").set_index("run")["top1"][line["run"]]
        assert line["clean_error"] == pytest.approx(100 - clean)
        assert line["excess_error"] == pytest.approx(line["mce_unnormalised"] - line["clean_error"])
    first, second = about["runs"]
    assert second["against_first"] == pytest.approx(second["mce_unnormalised"] - first["mce_unnormalised"])
    assert second["excess_against_first"] == pytest.approx(second["excess_error"] - first["excess_error"])
    assert "41.5" in capsys.readouterr().out
    for name in ("manifest.json", "robustness.md", "evaluation.json"):
        assert str(tmp_path.parent) not in (out / name).read_text()


def test_what_was_finished_is_not_done_again(monkeypatch, capsys, tmp_path, data, runs):
    out = tmp_path / "out"
    asked = ("--corruption", "fog", "--corruption", "contrast", "--device", "cpu", "--output", out)
    done, measured = [], robustness.predict_corrupted

    def killed_at_the_second(name, *arguments, **options):
        done.append(name)
        if len(done) == 2:
            raise KeyboardInterrupt
        return measured(name, *arguments, **options)

    monkeypatch.setattr(robustness, "predict_corrupted", killed_at_the_second)
    assert command(monkeypatch, runs / "none", "--data", data, *asked) != 0
    assert pd.read_csv(out / "corruptions.csv")["corruption"].unique().tolist() == ["fog"]
    assert command(monkeypatch, runs / "none", "--data", data, *asked) == 0
    assert done == ["fog", "contrast", "contrast"]
    assert "Going on: 1 of 2 corruptions are done." in capsys.readouterr().out
    (line,) = json.loads((out / "evaluation.json").read_text())["runs"]
    assert {"normalised", "unnormalised"} <= set(line)
    assert "mce" not in line, "that is the word for all fifteen"
    assert command(monkeypatch, runs / "none", "--data", data, *asked, "--seed", 1) == 0
    assert done[3:] == ["fog", "contrast"], "another seed draws others"
    assert command(monkeypatch, runs / "none", "--data", data, "--device", "cpu", "--output", out) == 0
    assert not (out / "corruptions.csv").exists(), "the manifest beside it would be of something else"


def test_a_damaged_file_of_finished_corruptions_counts_as_none(tmp_path):
    path, hits = tmp_path / "hits.npz", {"fog": np.ones((1, 2, 5), bool)}
    write_hits(path, "ours", hits)
    assert read_hits(path, "ours")["fog"].all()
    assert read_hits(path, "another's") == {}
    path.write_bytes(path.read_bytes()[:-40])
    assert read_hits(path, "ours") == {}
    assert read_hits(tmp_path / "missing.npz", "ours") == {}


def test_alexnet_has_an_mce_of_100_and_the_papers_columns_their_means():
    assert list(ALEXNET) == list(NAMES)
    wrong = {name: np.arange(1000)[None, :, None].repeat(5, 2) < 1000 * share for name, share in ALEXNET.items()}
    hits = {name: ~each for name, each in wrong.items()}
    assert robustness.compute_picture_errors(hits, 0, normalised=True).mean() == pytest.approx(100, abs=0.1)
    (reported,) = RobustnessReport([], {}).build_tables()
    assert reported.rows == [
        ["DeiT-S", "54.6", "44.0", "44.0", "56.0"],
        ["DeiT-S + MJP", "51.6 or 40.78", "41.5", "43.2", "55.1"],
    ]
    (remark,) = RobustnessReport([], {}).collect_remarks()
    assert "gains 0.8 points unnormalised, 0.9 normalised" in remark


@pytest.mark.parametrize("levels", [3, 10**6], ids=["ties", "no ties"])
def test_detection_is_that_of_scikit_learn(levels):
    generator = np.random.default_rng(levels)
    foreign = generator.integers(0, levels, 40) / levels
    familiar = np.sqrt(generator.integers(0, levels, 90) / levels)
    found = detect(foreign, familiar)
    truth, scores = np.repeat([1, 0], [40, 90]), -np.r_[foreign, familiar]
    false_alarms, recall, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert (found.foreign, found.familiar) == (40, 90)
    assert found.aupr == pytest.approx(100 * average_precision_score(truth, scores))
    assert found.auroc == pytest.approx(100 * roc_auc_score(truth, scores))
    assert found.fpr95 == pytest.approx(100 * false_alarms[recall >= 0.95][0])


def test_aurra_is_the_mean_accuracy_of_the_most_confident():
    generator = np.random.default_rng(0)
    confidence, correct = generator.random(20), generator.random(20) < 0.4
    ranked = [correct[index] for index in sorted(range(20), key=lambda index: -confidence[index])]
    expected = np.mean([np.mean(ranked[: count + 1]) for count in range(20)])
    assert compute_aurra(RestrictedPredictions(confidence, correct)) == pytest.approx(expected)


def test_imagenet_a_and_o_are_predicted_among_their_classes(monkeypatch, tmp_path, runs):
    adversarial = folder_of_pictures(tmp_path / "a", ["class0", "class2"], seed=1)
    foreign = folder_of_pictures(tmp_path / "o", ["class1", "class2"], seed=2)
    imagenet = folder_of_pictures(tmp_path / "imagenet", ["class0", "class1", "class2", "other"], seed=3, pictures=8)
    out = tmp_path / "out"
    folders = ("--imagenet-a", adversarial, "--imagenet-o", foreign, "--imagenet", imagenet)
    assert command(monkeypatch, runs / "none", *folders, "--device", "cpu", "--output", out) == 0
    assert not (out / "evaluation.csv").exists()
    (line,) = json.loads((out / "evaluation.json").read_text())["runs"]
    run = open_run(runs / "none")
    network = build(run.model).eval()

    def probabilities(folder: Path, names: list[str]) -> tuple[np.ndarray, list[str]]:
        paths = sorted(path for name in names for path in (folder / name).iterdir())
        images = torch.stack([to_image(Image.open(path), 32, crop_share=run.crop_share) for path in paths])
        with torch.inference_mode():
            logits = network(images)[:, [int(name[-1]) for name in names]].double()
        return logits.softmax(1).numpy(), [path.parent.name for path in paths]

    among, truth = probabilities(adversarial, ["class0", "class2"])
    correct = [["class0", "class2"][place] for place in among.argmax(1)] == np.array(truth)
    assert (line["imagenet_a"]["pictures"], line["imagenet_a"]["classes"]) == (PICTURES, 2)
    assert line["imagenet_a"]["accuracy"] == pytest.approx(100 * np.mean(correct))
    scores = [-probabilities(folder, ["class1", "class2"])[0].max(1) for folder in (foreign, imagenet)]
    positive = np.repeat([1, 0], [len(part) for part in scores])
    assert line["imagenet_o"]["familiar"] == len(scores[1]) == 4
    assert line["imagenet_o"]["aupr"] == pytest.approx(100 * average_precision_score(positive, np.concatenate(scores)))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["robustness"] == {"corruptions": [], "imagenet_a": "a", "imagenet_o": "o", "imagenet": "imagenet"}


def test_weights_alone_have_imagenets_classes_if_they_have_1000(runs):
    run = open_run(runs / "none")
    alone = TrainedModel("weights", run.model.model_copy(update={"classes": 1000}), None)
    assert find_class_names(alone, []) == names_of_imagenet()
    assert find_class_names(alone, ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "{data}", "--corruption", "gausian_noise"], "Did you mean gaussian_noise"),
        (["--corruptions"], "corruptions are of pictures: name them with --data"),
        ([], "name pictures: --data DIR"),
        (["--imagenet-o", "{data}"], "--imagenet-o and --imagenet go together"),
        (["--imagenet-a", "missing"], "there is no folder missing"),
        (["--imagenet-a", "{wrong}"], "'classs1', which is none of the run's 3: did you mean 'class1'"),
        (["--data", "{data}", "--imagenet-a", "{data}", "--output", "{data}/out"], "which is read"),
        (["--imagenet-o", "{data}", "--imagenet", "{wrong}"], "holds no picture of the 3 classes of"),
    ],
)
def test_bad_input_is_one_line_and_loses_nothing(monkeypatch, capsys, tmp_path, data, runs, arguments, message):
    monkeypatch.chdir(tmp_path)
    wrong = folder_of_pictures(tmp_path / "wrong", ["classs1"], seed=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".fedmjp").touch()
    (tmp_path / "out" / "corruptions.csv").write_text("kept")
    given = [argument.format(data=data, wrong=wrong) for argument in arguments]
    output = [] if "--output" in given else ["--output", "out"]
    assert command(monkeypatch, runs / "none", *given, *output) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert (tmp_path / "out" / "corruptions.csv").read_text() == "kept"


def test_a_run_that_does_not_say_its_classes_cannot_read_imagenet_a(monkeypatch, capsys, tmp_path, data):
    assert command(monkeypatch, keep(tmp_path / "run", training()), "--imagenet-a", data) == BAD_INPUT
    assert "does not say which its 3 classes are" in capsys.readouterr().err
