"""What takes the place of data sets and weights that are not on this machine: given pictures, and drawn weights.

What is here (a file, a cache) is taken as it is; only where loading fails something stands in, and that is noted. The
order matters: it is put in place before the app is imported.
"""

import gzip
import importlib
import io
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from . import settings, tables
from .modules import find_missing_modules

# Of data sets by a part of their name: pixels per side, channels, classes. The longer name goes first.
PICTURES = {
    "fashion": (28, 1, 10), "emnist": (28, 1, 47), "mnist": (28, 1, 10), "cifar100": (32, 3, 100),
    "cifar10": (32, 3, 10), "svhn": (32, 3, 10), "stl10": (96, 3, 10), "tiny-imagenet": (64, 3, 200),
    "mednist": (64, 1, 6), "flowers": (224, 3, 102), "pet": (224, 3, 37), "food101": (224, 3, 101),
    "eurosat": (64, 3, 10),
}  # fmt: skip
OTHERS = (224, 3, 10)
IMAGE_COLUMNS = ("img", "image", "pixel_values", "images")
ARCHIVES = re.compile(r"([\w.-]+?)(\.tar\.gz|\.tgz|\.tar|\.zip)(?:\?|$)")
TEXT_COLUMNS = ("text", "sentence", "url", "review", "content")
LABEL_COLUMNS = ("labels", "target")
BOTH_LABELS = ("fine_label", "label")
PER_CLIENT, PER_CLIENT_LARGE = 150, 12  # rows of a split for each client: of large pictures, or enlarged ones, fewer
LARGE = 96  # pixels per side
WORDS = tuple("abcdefghijklmnop")
# Of models by a word of their name: layers, dimensions, heads; as of DeiT, and of the small BERTs.
VISION_SIZES = {"tiny": (12, 192, 3), "small": (12, 384, 6)}
TEXT_SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "small": (4, 512, 8)}

# Libraries that would wait for the network are told that there is none.
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}  # fmt: skip

_installed = False
_given: dict[str, Any] = {}


def install(side_settings: dict[str, Any]) -> None:
    """Put everything in place, once.

    Args:
        side_settings: Settings of a side.
    """
    global _installed
    if _installed:
        return
    _installed = True
    _given.update(side_settings)
    os.environ.update(OFFLINE)
    find_missing_modules(side_settings["code"], _say)
    places = (
        _hub_datasets, _frames, _archives, _torchvision_datasets, _torchvision_weights, _timm_weights, _transformers,
        _hub_metrics,
    )  # fmt: skip
    for replace in places:
        try:
            replace()
        except ImportError:
            continue  # the app cannot use what is not installed


def _say(kind: str, name: str, instead: str) -> None:
    settings.note(Path(_given["folder"]), "stand-ins.jsonl", {"what": kind, "name": name, "instead": instead})


def pictures(count: int, side: int, channels: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Cut different parts of the bundled pictures, uint8 (side, side, 3) or (side, side).

    Args:
        count: Number of parts.
        side: Pixels per side.
        channels: 1 or 3.
        seed: Of the draw.
    """
    from PIL import Image  # noqa: PLC0415 (apps without pictures may lack it)

    source = np.load(_given["pictures"])["pictures"]
    generator = np.random.default_rng(seed)
    images = []
    for place in range(count):
        whole = source[place % len(source)]
        size = int(generator.integers(whole.shape[0] // 2, whole.shape[0] + 1))
        top, left_edge = (int(generator.integers(0, whole.shape[0] - size + 1)) for _ in range(2))
        part = Image.fromarray(whole[top : top + size, left_edge : left_edge + size]).resize((side, side))
        if generator.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        images.append(np.asarray(part if channels > 1 else part.convert("L")))
    return images


def labels(count: int, classes: int, seed: int) -> list[int]:
    """Draw labels of which some are frequent and some rare: all alike would be guessed.

    Args:
        count: Number of labels.
        classes: Number of classes.
        seed: Of the draw.
    """
    share = 1 / (1 + np.arange(classes))
    return [int(label) for label in np.random.default_rng(seed).choice(classes, count, p=share / share.sum())]


def kind_of(name: str) -> tuple[int, int, int]:
    """Look up side, channels and classes of a data set.

    Args:
        name: Of the data set.
    """
    plain = name.lower().replace("_", "").replace("-", "")
    return next((kind for part, kind in PICTURES.items() if part.replace("-", "") in plain), OTHERS)


def _column(candidates: Sequence[str]) -> str | None:
    """Return the first of these names that the app's code has in quotes."""
    return next((name for name in candidates if name in _given["literals"]), None)


def _hub_datasets() -> None:
    import datasets  # noqa: PLC0415

    original = datasets.load_dataset

    @wraps(original)
    def load_dataset(path: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return original(path, *arguments, **keywords)
        except Exception:  # noqa: BLE001 (of many kinds, all meaning that it is not here)
            splits = _hub_dataset(path)
            split = keywords.get("split")
            return splits if split is None else splits["train" if "train" in str(split) else "test"]

    datasets.load_dataset = load_dataset


def _hub_dataset(path: str) -> Any:
    import datasets  # noqa: PLC0415

    image, text = _column(IMAGE_COLUMNS), _column(TEXT_COLUMNS)
    side, channels, classes = kind_of(path)
    columns = _table(path, is_other=image is not None or text is not None)
    if columns is not None:
        tables_drawn = [columns.draw(_rows(), _given["clients"], seed) for seed in range(2)]
        _say("data set", path, f"{_rows()} drawn rows of a table for training, as many for testing")
        train, test = (datasets.Dataset.from_dict(drawn) for drawn in tables_drawn)
        return datasets.DatasetDict({"train": train, "test": test})
    label_names = [
        name for name in BOTH_LABELS if name in _given["literals"]
    ]  # a data set may have one, and the code both
    label_columns = label_names or [_column(LABEL_COLUMNS) or "label"]
    sites = tables.read_columns(Path(_given["code"])).sites
    splits = {}
    for seed, split in enumerate(("train", "test")):
        if image is None and text is not None:
            count, classes = _rows(), 2
            generator = np.random.default_rng(seed)
            rows: dict[str, Any] = {text: [" ".join(generator.choice(WORDS, 24)) for _ in range(count)]}
            features = {text: datasets.Value("string")}
            description = "sentences of drawn letters"
        else:
            count, column = _rows(side), image or "image"
            rows = {column: pictures(count, side, channels, seed)}
            features = {column: datasets.Image()}
            description = f"parts of bundled pictures, {side} x {side}"
        for label in label_columns:
            rows[label] = labels(count, classes, seed)
            features[label] = datasets.ClassLabel(num_classes=classes)
        for site in sites:
            rows[site] = [place % _given["clients"] for place in range(count)]
            features[site] = datasets.Value("int64")
        splits[split] = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    _say("data set", path, f"{count} {description} for training, as many for testing")
    return datasets.DatasetDict(splits)


def _table(path: str, *, is_other: bool) -> tables.Columns | None:
    """Return the columns of a data set that is a table; None where it is of pictures or of texts."""
    columns = tables.read_columns(Path(_given["code"]))
    if (familiar := tables.find_known(path)) is not None:
        names = {*columns.numbers, *columns.words}
        is_version = len(names) > 1 and not names & {*familiar.numbers, *familiar.words}  # with names of its own
        return columns if is_version and columns.labels else familiar
    is_table = bool(columns.labels and (columns.numbers or columns.words))
    return columns if is_table and not is_other and kind_of(path) is OTHERS else None


def _frames() -> None:
    """Have pandas read a drawn table where the file is not here."""
    library: Any = importlib.import_module("pandas")

    def stand_in_for(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def read(path: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return original(path, *arguments, **keywords)
            except Exception:
                columns = tables.frame_columns(str(path), keywords, Path(_given["code"]))
                rows = columns.draw(PER_CLIENT, _given["clients"], int("test" in str(path).lower()))
                if not rows:
                    raise
                _say("table", str(path), f"{PER_CLIENT} drawn rows of {len(rows)} columns")
                return library.DataFrame(rows)

        return read

    for name in ("read_csv", "read_parquet", "read_excel", "read_pickle", "read_table"):
        setattr(library, name, stand_in_for(getattr(library, name)))


class _Response(io.BytesIO):
    """An answer to a request, as urllib's are."""

    status, headers = 200, {"Content-Type": "application/octet-stream"}


def _archives() -> None:
    """Have urllib fetch an archive of pictures, in a folder for each class, where the network is not there."""
    request: Any = importlib.import_module("urllib.request")
    urlopen, urlretrieve = request.urlopen, request.urlretrieve

    def stand_in(url: Any) -> bytes | None:
        name = ARCHIVES.search(str(getattr(url, "full_url", url)))
        return None if name is None else _archive(name[1], name[2])

    @wraps(urlopen)
    def open_or_stand_in(url: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return urlopen(url, *arguments, **keywords)
        except Exception:
            content = stand_in(url)
            if content is None:
                raise
            return _Response(content)

    @wraps(urlretrieve)
    def retrieve_or_stand_in(url: str, filename: Any = None, *arguments: Any, **keywords: Any) -> Any:
        try:
            return urlretrieve(url, filename, *arguments, **keywords)
        except Exception:
            content = stand_in(url)
            if content is None or filename is None:
                raise
            Path(filename).write_bytes(content)
            return filename, {}

    request.urlopen, request.urlretrieve = open_or_stand_in, retrieve_or_stand_in


def _archive(name: str, ending: str) -> bytes:
    """Pack parts of bundled pictures as ``name/class/number.jpeg``, a folder for each class."""
    from PIL import Image  # noqa: PLC0415 (apps without pictures may lack it)

    side, channels, usual = kind_of(name)
    classes = (tables.read_classes(Path(_given["code"])) or usual) if (side, channels, usual) == OTHERS else usual
    count, archive = max(_rows(side) // 2, 2 * classes), io.BytesIO()  # networks for folders are often large
    files: dict[str, bytes] = {}
    for number, pixels in enumerate(pictures(count, side, channels, 0)):
        Image.fromarray(pixels).save(content := io.BytesIO(), "JPEG", quality=95)
        files[f"{name}/{number % classes:03d}/{number:05d}.jpeg"] = content.getvalue()
    if ending == ".zip":
        with zipfile.ZipFile(archive, "w") as pack:
            for path, content_bytes in files.items():
                pack.writestr(zipfile.ZipInfo(path), content_bytes)
    else:
        with tarfile.open(fileobj=archive, mode="w") as pack_of_tar:
            for path, content_bytes in files.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(content_bytes)
                pack_of_tar.addfile(entry, io.BytesIO(content_bytes))
    _say("archive", name, f"{count} parts of bundled pictures, {side} x {side}, in folders of {classes} classes")
    return archive.getvalue() if ending in (".zip", ".tar") else gzip.compress(archive.getvalue(), mtime=0)


class _Accuracy:
    """In place of a metric of the hub: the share of predictions that are right, whatever was asked for."""

    def __init__(self, name: str) -> None:
        self._name, self._right = name, list[bool]()

    def add_batch(self, *, predictions: Any, references: Any, **_: Any) -> None:
        """Count a batch."""
        self._right += [
            bool(prediction == reference) for prediction, reference in zip(predictions, references, strict=True)
        ]

    def compute(self, *, predictions: Any = (), references: Any = (), **_: Any) -> dict[str, float]:
        """Return the share of right predictions, by the metric's name."""
        self.add_batch(predictions=predictions, references=references)
        return {self._name: sum(self._right) / max(len(self._right), 1)}


def _hub_metrics() -> None:
    evaluate: Any = importlib.import_module("evaluate")
    original = evaluate.load

    @wraps(original)
    def load(path: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return original(path, *arguments, **keywords)
        except Exception:  # noqa: BLE001 (of many kinds, all meaning that it is not here)
            _say("metric", path, "the share of predictions that are right")
            return _Accuracy(path)

    evaluate.load = load


def _rows(side: int = 0) -> int:
    """Count the rows of all clients, for pictures of so many pixels per side or for texts."""
    large = side >= LARGE or (side > 0 and _given["enlarges"])
    return int((PER_CLIENT_LARGE if large else PER_CLIENT) * _given["clients"])


def _torchvision_datasets() -> None:
    from torchvision import datasets  # noqa: PLC0415

    left_alone = {"VisionDataset", "FakeData", "ImageFolder", "DatasetFolder"}
    for name in datasets.__all__:
        kind = getattr(datasets, name)
        if isinstance(kind, type) and issubclass(kind, datasets.VisionDataset) and name not in left_alone:
            _stand_in_for(kind)


def _stand_in_for(kind: Any) -> None:
    initialise, length, item = kind.__init__, kind.__len__, kind.__getitem__

    @wraps(initialise)
    def initialise_or_stand_in(self: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            initialise(self, *arguments, **{**keywords, **({"download": False} if "download" in keywords else {})})
        except Exception:  # noqa: BLE001
            train = (
                arguments[1] if len(arguments) > 1 else keywords.get("train", keywords.get("split", "train") == "train")
            )
            name = next(
                ancestor.__name__ for ancestor in type(self).__mro__ if ancestor.__module__.startswith("torchvision.")
            )
            side, channels, classes = kind_of(name)
            count = _rows(side)
            self.data = np.stack(pictures(count, side, channels, int(not train)))
            self.targets = labels(count, classes, int(not train))
            self.classes = [str(number) for number in range(classes)]
            self.root, self.train = keywords.get("root", arguments[0] if arguments else "."), bool(train)
            self.transform, self.target_transform = keywords.get("transform"), keywords.get("target_transform")
            self.transforms = None
            self.stands_in = True
            description = f"{count} parts of bundled pictures, {side} x {side}"
            _say("data set", f"torchvision {name}", description)

    def item_or_stand_in(self: Any, place: int) -> Any:
        if not getattr(self, "stands_in", False):
            return item(self, place)
        from PIL import Image  # noqa: PLC0415

        picture, target = Image.fromarray(self.data[place]), self.targets[place]
        return (
            self.transform(picture) if self.transform else picture,
            self.target_transform(target) if self.target_transform else target,
        )

    kind.__init__, kind.__getitem__ = initialise_or_stand_in, item_or_stand_in
    kind.__len__ = lambda self: len(self.targets) if getattr(self, "stands_in", False) else length(self)


class _Drawn(dict[str, Any]):
    """In place of a state dictionary: weights stay as they were drawn."""


def _torchvision_weights() -> None:
    import torch  # noqa: PLC0415
    from torchvision.models import _api  # noqa: PLC0415

    module: Any = torch.nn.Module
    original, load = _api.WeightsEnum.get_state_dict, module.load_state_dict

    def get_state_dict(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return original(self, *arguments, **keywords)
        except Exception:  # noqa: BLE001
            _say("weights", f"torchvision {self}", "drawn weights")
            return _Drawn()

    @wraps(load)
    def load_state_dict(self: Any, state: Any, *arguments: Any, **keywords: Any) -> Any:
        return None if isinstance(state, _Drawn) else load(self, state, *arguments, **keywords)

    fetch = torch.hub.load_state_dict_from_url

    @wraps(fetch)
    def load_state_dict_from_url(url: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return fetch(url, *arguments, **keywords)
        except Exception:  # noqa: BLE001
            _say("weights", url, "drawn weights")
            return _Drawn()

    torch.hub.load_state_dict_from_url = load_state_dict_from_url
    _api.WeightsEnum.get_state_dict = get_state_dict
    module.load_state_dict = load_state_dict


def _timm_weights() -> None:
    import timm  # noqa: PLC0415

    library: Any = timm
    original = library.create_model

    @wraps(original)
    def create_model(name: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return original(name, *arguments, **keywords)
        except Exception:
            pretrained = keywords.get("pretrained", arguments[0] if arguments else False)
            if not pretrained:
                raise
            _say("weights", f"timm {name}", "drawn weights")
            return original(name, *([False, *arguments[1:]] if arguments else ()), **{**keywords, "pretrained": False})

    library.create_model = library.models.create_model = create_model


def _transformers() -> None:
    import transformers  # noqa: PLC0415
    from transformers.models.auto.auto_factory import _BaseAutoModelClass  # noqa: PLC0415

    _stand_in(transformers.PreTrainedModel, _drawn_model, "weights", "drawn weights")
    _stand_in(_BaseAutoModelClass, _drawn_model, "weights", "drawn weights")
    _stand_in(
        transformers.AutoConfig, lambda _kind, name, keywords: _config(name, keywords), "configuration", "a default one"
    )
    _stand_in(transformers.AutoTokenizer, _tokenizer, "tokenizer", "a tokenizer of letters")
    _stand_in(transformers.PreTrainedTokenizerBase, _tokenizer, "tokenizer", "a tokenizer of letters")
    if hasattr(transformers, "AutoImageProcessor"):
        for kind in (transformers.AutoImageProcessor, transformers.AutoFeatureExtractor):
            _stand_in(kind, lambda _kind, _name, _named: transformers.ViTImageProcessor(), "processor", "ViT's default")
        _stand_in(transformers.ViTImageProcessor, lambda kind, _name, _named: kind(), "processor", "ViT's default")


def _stand_in(kind: Any, make: Callable[[Any, str, dict[str, Any]], Any], subject: str, instead: str) -> None:
    original = kind.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            loaded = original(cls, name, *arguments, **keywords)
            # transformers 5 makes a tokenizer without words where it finds no file of them.
            if subject != "tokenizer" or len(loaded) > len(loaded.all_special_tokens):
                return loaded
        except Exception:  # noqa: BLE001, S110 (of many kinds, all meaning that it is not here)
            pass
        stand_in = make(cls, str(name), keywords)
        _say(subject, str(name), instead)
        return stand_in

    kind.from_pretrained = classmethod(from_pretrained)


def _config(name: str, keywords: dict[str, Any]) -> Any:
    """Build the configuration that a name speaks of: its longest type, its size, and what the app asks for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    words = name.lower()
    types = [kind for kind in CONFIG_MAPPING.keys() if re.search(rf"\b{re.escape(kind)}", words)]  # noqa: SIM118
    if not types:
        raise OSError(f"nothing stands in for {name!r}: its name speaks of no type of model that transformers knows")
    config = CONFIG_MAPPING[max(types, key=len)]()
    return _sized(config, words, keywords)


def _sized(config: Any, words: str, keywords: dict[str, Any]) -> Any:
    sizes = VISION_SIZES if getattr(config, "model_type", "") in ("vit", "deit") else TEXT_SIZES
    for word, (layers, hidden, heads) in sizes.items():
        if word in words and hasattr(config, "hidden_size"):
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads = layers, hidden, heads
            config.intermediate_size = 4 * hidden
    for key, value in keywords.items():
        if hasattr(config, key) or key == "num_labels":
            setattr(config, key, value)
    return config


def _drawn_model(kind: Any, name: str, keywords: dict[str, Any]) -> Any:
    config = keywords.get("config")
    if config is None:
        default = getattr(kind, "config_class", None)
        config = _config(name, keywords) if default is None else _sized(default(), name.lower(), keywords)
    return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def _tokenizer(_kind: Any, _name: str, keywords: dict[str, Any]) -> Any:
    import transformers  # noqa: PLC0415

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    path = Path(_given["folder"]) / "vocabulary.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(vocabulary))
    length = keywords.get("model_max_length", 512)
    library: Any = transformers
    if int(library.__version__.partition(".")[0]) >= 5:  # which takes no notice of a file
        numbered = {word: number for number, word in enumerate(vocabulary)}
        return library.BertTokenizerFast(vocab=numbered, model_max_length=length)
    return library.BertTokenizerFast(vocab_file=str(path), model_max_length=length)
