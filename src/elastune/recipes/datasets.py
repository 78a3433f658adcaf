"""The data sets of the examples: handwritten digits from scikit-learn, MNIST, and Fashion-MNIST.

Images are float32 from 0 to 1 of shape (N, 1, height, width); labels are int64 of shape (N,). Splits never change.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
import os
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.run import derive

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
PARTS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# SHA-256 of the uncompressed files of MNIST, in the order of PARTS.
MNIST_SHA256 = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
FASHION_LABELS_SHA256 = "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"  # t10k, uncompressed
SIDE = 28
CLASSES = 10
MAX_BYTES = 64 << 20  # uncompressed; the largest file of MNIST has 47 MB
DOWNLOAD_LIMIT_S = 60.0
_FOLDERS = {
    "mnist": (".", "mnist", "MNIST/raw"),
    "fashion_mnist": ("fashion-mnist", "FashionMNIST/raw"),
}


@dataclass(frozen=True)
class Splits:
    """A data set in three parts, of which no two share a sample.

    Attributes:
        train: For training.
        validation: For choosing settings.
        test: For judging the choice.
    """

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset


def digits() -> Splits:
    """Return scikit-learn's 1,797 digits of 8x8 pixels: 1,000 to train, 397 to validate, 400 to test.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998 (its test set).
    """
    file = find_digits()
    if file is None:
        raise UserError("digits come with scikit-learn", "no scikit-learn", "pip install scikit-learn")
    table = _digits_in_order(file)
    images = torch.from_numpy(table[:, :64] / 16).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, 64].astype(np.int64))

    def part(start: int, stop: int) -> TensorDataset:
        return TensorDataset(images[start:stop], labels[start:stop])

    return Splits(part(0, 1000), part(1000, 1397), part(1397, 1797))


@cache
def _digits_in_order(file: Path) -> np.ndarray:
    """The file's rows; kept, since programs ask for the splits more than once."""
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    # An order by hash is the same in every version of every library.
    return table[sorted(range(len(table)), key=lambda index: derive(0, "digits", index))]


def mnist(data: Path | None = None, *, download: bool | None = None) -> Splits:
    """Return MNIST; the last 10,000 of its 60,000 training images are for validation.

    The files (idx, plain or gzipped) may lie in the folder itself, in its ``mnist`` or in its ``MNIST/raw``.

    Args:
        data: The folder to look in; None: ``$ELASTUNE_DATA`` and the user's cache.
        download: Whether missing files may be fetched from a public mirror into the cache; None: whether
            ``$ELASTUNE_DOWNLOAD`` is 1.

    Raises:
        UserError: Where there are no files, or they are damaged.
    """
    folder = find("mnist", data)
    if folder is None and (os.environ.get("ELASTUNE_DOWNLOAD") == "1" if download is None else download):
        folder = download_mnist(cache_folder() / "mnist")
    if folder is None:
        sources = (
            "give the folder of its idx files by --data or ELASTUNE_DATA, set ELASTUNE_DOWNLOAD=1 to fetch them, "
            "or 'apt-get install dataset-fashion-mnist' and ask for fashion_mnist instead"
        )
        raise UserError("MNIST must be on this machine", _searched(data), sources)
    splits = _idx_splits(folder)
    labels = splits.test.tensors[1].to(torch.uint8).numpy().tobytes()
    if hashlib.sha256((8 << 8 | 1).to_bytes(4, "big") + len(labels).to_bytes(4, "big") + labels).hexdigest() == (
        FASHION_LABELS_SHA256
    ):
        raise UserError("MNIST was asked for", f"Fashion-MNIST in {folder}", "ask for fashion_mnist, or move the files")
    return splits


def fashion_mnist(data: Path | None = None) -> Splits:
    """Return Fashion-MNIST (Xiao et al. 2017), in the shapes of MNIST.

    Its files have the names of MNIST's. In a given folder they lie in ``fashion-mnist`` or ``FashionMNIST/raw``.

    Args:
        data: The folder to look in; None: ``$ELASTUNE_DATA`` or Debian's package.

    Raises:
        UserError: Where there are no files, or they are damaged.
    """
    folder = find("fashion_mnist", data)
    if folder is None:
        fix = "apt-get install dataset-fashion-mnist, or put its idx files into fashion-mnist/ in --data"
        raise UserError("Fashion-MNIST must be on this machine", _searched(data), fix)
    return _idx_splits(folder)


def find(name: str, data: Path | None = None) -> Path | None:
    """Return the folder that holds all four files of "mnist" or "fashion_mnist"; None where there is none."""
    root = data or (Path(os.environ["ELASTUNE_DATA"]) if os.environ.get("ELASTUNE_DATA") else None)
    places = [root / folder for folder in _FOLDERS[name]] if root else []
    if data is None:
        places.append(cache_folder() / "mnist" if name == "mnist" else DEBIAN_FASHION)
    return next((place for place in places if all(_file(place, part) for part in PARTS)), None)


def find_digits() -> Path | None:
    """Return the path of scikit-learn's file; None where there is none.

    It does not import scikit-learn, which takes a second in every worker.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return file if file.is_file() else None


def cache_folder() -> Path:
    """Return the folder of downloads: ``elastune`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastune"


def download_mnist(folder: Path, mirrors: Sequence[str] = MIRRORS, sha256: Sequence[str] = MNIST_SHA256) -> Path:
    """Fetch MNIST's four files into ``folder``, each from the first of ``mirrors`` that has the right content.

    Files appear whole or not at all, so several workers may do this at the same time.

    Raises:
        UserError: Names what failed.
    """
    for part, wanted in zip(PARTS, sha256, strict=True):
        target = folder / f"{part}.gz"
        if not target.exists():
            _keep(_fetch(part, wanted, mirrors), target)
    return folder


def read_idx(path: Path, dims: int) -> torch.Tensor:
    """Return the uint8 tensor of ``dims`` dimensions in an idx file, plain or gzipped.

    Format: two zero bytes, 8 (unsigned bytes), the number of dimensions, each size as a big-endian 32-bit number, data.

    Raises:
        UserError: For any other file, and for more than ``MAX_BYTES``; it names the file.
    """
    content = _content(path)
    head = 4 + 4 * dims
    magic = bytes((0, 0, 8, dims))
    if content[:4] != magic:
        raise _bad(path, f"it begins with {content[:4].hex() or 'nothing'}, not {magic.hex()}")
    if len(content) < head:
        raise _bad(path, f"its header has {len(content)} of {head} bytes")
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, head, 4)]
    expected = head + math.prod(sizes)
    if len(content) != expected or 0 in sizes:
        raise _bad(path, f"it holds {len(content)} bytes where sizes {sizes} make {expected}")
    return torch.frombuffer(bytearray(content[head:]), dtype=torch.uint8).reshape(sizes)


def _idx_splits(folder: Path) -> Splits:
    train = _labelled(folder, "train")
    images, labels = train.tensors
    held_out = len(labels) // 6  # 10,000 of 60,000
    cut = len(labels) - held_out
    return Splits(
        TensorDataset(images[:cut], labels[:cut]),
        TensorDataset(images[cut:], labels[cut:]),
        _labelled(folder, "t10k"),
    )


def _labelled(folder: Path, prefix: str) -> TensorDataset:
    images_file, labels_file = (_file(folder, part) for part in PARTS if part.startswith(prefix))
    if images_file is None or labels_file is None:
        raise UserError("a data set's files must stay", folder, "restore them")
    images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise _bad(images_file, f"its images are {images.shape[1]}x{images.shape[2]}, not {SIDE}x{SIDE}")
    if len(labels) != len(images):
        raise _bad(labels_file, f"it has {len(labels)} labels for {len(images)} images")
    if int(labels.max()) >= CLASSES:
        raise _bad(labels_file, f"it has label {int(labels.max())} of {CLASSES} classes")
    return TensorDataset(images.unsqueeze(1).float().div_(255), labels.long())


def _file(folder: Path, part: str) -> Path | None:
    names = (part, part.replace("-idx", ".idx"))
    candidates = (folder / f"{name}{ending}" for name in names for ending in ("", ".gz"))
    return next((file for file in candidates if file.exists()), None)


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, getattr(error, "strerror", None) or error) from None
    if len(content) > MAX_BYTES:
        raise _bad(path, f"it holds more than {MAX_BYTES >> 20} MiB")
    return content


def _fetch(part: str, wanted: str, mirrors: Sequence[str]) -> bytes:
    troubles = []
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(f"{mirror}{part}.gz", timeout=DOWNLOAD_LIMIT_S) as answer:
                packed = answer.read(MAX_BYTES + 1)
            content = zlib.decompressobj(wbits=31).decompress(packed, MAX_BYTES)
        except (OSError, zlib.error) as error:
            troubles.append(f"{mirror}: {error}")
            continue
        if hashlib.sha256(content).hexdigest() == wanted:
            return bytes(packed)
        troubles.append(f"{mirror}: other content than MNIST's")
    rule = f"{part} must come from a mirror unchanged"
    raise UserError(rule, "; ".join(troubles), "go online, or give the idx files by --data or ELASTUNE_DATA")


def _keep(content: bytes, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, content)
    except OSError as error:
        raise UserError("a download needs a folder to write to", error, "set XDG_CACHE_HOME to one") from None


def _searched(data: Path | None) -> str:
    if data is not None:
        return f"nothing complete in {data}"
    if os.environ.get("ELASTUNE_DATA"):
        return f"nothing complete in ELASTUNE_DATA={os.environ['ELASTUNE_DATA']}"
    return "no --data and no ELASTUNE_DATA"


def _bad(path: Path, why: object) -> UserError:
    return UserError("an idx file must be whole and well formed", f"{path}: {why}", "fetch the file again")
