"""The example data sets: their splits, and idx files that are whole, torn, foreign or absent."""

import gzip
import hashlib
import http.server
import os
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.recipes import datasets
from elastune.recipes.datasets import MNIST_SHA256, PARTS, digits, download_mnist, fashion_mnist, find, mnist, read_idx


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(struct.pack(">I", size) for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes()


def contents(training: int = 60, testing: int = 20) -> list[bytes]:
    random = np.random.default_rng(0)
    arrays = []
    for count in (training, testing):
        arrays += [random.integers(0, 256, (count, 28, 28)), np.arange(count) % 10]
    return [idx(array) for array in arrays]


def fill(folder: Path, *, gz: bool = True, dotted: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, content in zip(PARTS, contents(), strict=True):
        name = part.replace("-idx", ".idx") if dotted else part
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any data set."""
    monkeypatch.delenv("ELASTUNE_DATA", raising=False)
    monkeypatch.delenv("ELASTUNE_DOWNLOAD", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", tmp_path / "no-debian")


def one_line(error: UserError) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_digits_are_scikit_learns_each_once() -> None:
    from sklearn.datasets import load_digits

    splits = digits()
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part) for part in parts] == [1000, 397, 400]
    images = torch.cat([part.tensors[0] for part in parts]).reshape(-1, 64)
    labels = torch.cat([part.tensors[1] for part in parts])
    source = load_digits()
    mine = sorted((*row, label) for row, label in zip((images * 16).tolist(), labels.tolist(), strict=True))
    theirs = sorted((*row, label) for row, label in zip(source.data.tolist(), source.target.tolist(), strict=True))
    assert mine == theirs
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    for part in parts:
        assert part.tensors[1].bincount(minlength=10).min() >= 25, "every class in every split"


def test_digits_never_change() -> None:
    digest = hashlib.sha256()
    for part in (digits().train, digits().validation, digits().test):
        for tensor in part.tensors:
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest() == "d0e10cb074180ae9e36b0fbc745749acab65967f9a0345e0a78266d7a49e272a"


@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize(("gz", "dotted"), [(True, False), (False, False), (False, True)])
def test_mnist_is_found_where_others_leave_it(tmp_path: Path, folder: str, gz: bool, dotted: bool) -> None:
    fill(tmp_path / folder, gz=gz, dotted=dotted)
    splits = mnist(tmp_path)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [50, 10, 20]
    assert splits.validation.tensors[1].tolist() == list(range(10)), "the last training images validate"
    assert splits.train.tensors[0].shape == (50, 1, 28, 28)
    pixels = np.frombuffer(contents()[0][16:], np.uint8).reshape(60, 1, 28, 28)
    assert torch.equal(splits.train.tensors[0], torch.from_numpy(pixels[:50] / np.float32(255)))


def test_mnist_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTUNE_DATA", str(tmp_path))
    assert find("mnist") is None
    assert find("fashion_mnist") is None
    fill(tmp_path / "mnist")
    assert find("mnist") == tmp_path / "mnist"
    fill(tmp_path / "fashion-mnist")
    assert len(fashion_mnist().train) == 50


def test_debians_folder_is_fashion_and_never_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "DEBIAN_FASHION", fill(tmp_path / "debian"))
    assert len(fashion_mnist().test) == 20
    with pytest.raises(UserError, match="MNIST must be on this machine"):
        mnist()


def test_a_missing_mnist_names_three_ways(tmp_path: Path) -> None:
    for given_folder in (None, tmp_path):
        with pytest.raises(UserError) as raised:
            mnist(given_folder)
        line = one_line(raised.value)
        for way in ("--data", "ELASTUNE_DATA", "ELASTUNE_DOWNLOAD=1", "dataset-fashion-mnist"):
            assert way in line
    with pytest.raises(UserError, match="dataset-fashion-mnist"):
        fashion_mnist()


def test_fashion_under_mnists_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    labels = contents()[3]
    monkeypatch.setattr(datasets, "FASHION_LABELS_SHA256", hashlib.sha256(labels).hexdigest())
    with pytest.raises(UserError, match="Fashion-MNIST in"):
        mnist(tmp_path)


IMAGES = contents()[0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "begins with nothing"),
        (b"\x00\x00\x09\x03" + IMAGES[4:], "begins with 00000903"),
        (IMAGES[:10], "header has 10 of 16 bytes"),
        (IMAGES[:-1], "bytes where sizes"),
        (IMAGES + b"\x00", "bytes where sizes"),
        (bytes((0, 0, 8, 3)) + b"\xff" * 12, "bytes where sizes"),
        (bytes((0, 0, 8, 3)) + b"\x00" * 12, "bytes where sizes"),
        (idx(np.zeros((60, 14, 28))), "images are 14x28"),
        (idx(np.zeros((59, 28, 28))), "60 labels for 59 images"),
    ],
)
def test_a_bad_images_file_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    fill(tmp_path, gz=False)
    (tmp_path / PARTS[0]).write_bytes(content)
    with pytest.raises(UserError) as raised:
        mnist(tmp_path)
    assert why in one_line(raised.value)
    assert "train-" in str(raised.value)


def test_labels_stay_within_ten_classes(tmp_path: Path) -> None:
    fill(tmp_path, gz=False)
    (tmp_path / PARTS[3]).write_bytes(idx(np.full(20, 10)))
    with pytest.raises(UserError, match="label 10 of 10 classes"):
        mnist(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "no gzip", "flipped", "a folder", "too large"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    file = tmp_path / f"{PARTS[0]}.gz"
    packed = bytearray(file.read_bytes())
    if damage == "truncated":
        file.write_bytes(packed[: len(packed) // 2])
    elif damage == "no gzip":
        file.write_bytes(b"<html>not found</html>")
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 255
        file.write_bytes(packed)
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        monkeypatch.setattr(datasets, "MAX_BYTES", 1 << 10)
    with pytest.raises(UserError) as raised:
        mnist(tmp_path)
    assert str(file) in one_line(raised.value)


@given(st.binary(max_size=64), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_tensor_or_a_user_error(content: bytes, dims: int) -> None:
    file = Path(os.environ["XDG_CACHE_HOME"]).parent / "any"
    for body in (content, bytes((0, 0, 8, dims)) + content):
        file.write_bytes(body)
        try:
            tensor = read_idx(file, dims)
        except UserError as error:
            one_line(error)
        else:
            assert idx(tensor.numpy()) == body


class Mirror:
    """A public mirror on this machine."""

    def __init__(self, folder: Path) -> None:
        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

        handler = partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self) -> str:
        self.thread.start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_a_download_takes_the_mirror_with_the_right_content(tmp_path: Path) -> None:
    sums = [hashlib.sha256(content).hexdigest() for content in contents()]
    bad = fill(tmp_path / "bad")
    (bad / f"{PARTS[0]}.gz").write_bytes(gzip.compress(b"something else"))
    (bad / f"{PARTS[1]}.gz").unlink()
    (bad / f"{PARTS[2]}.gz").write_bytes(b"<html>")
    target = tmp_path / "cache" / "elastune" / "mnist"
    with Mirror(bad) as first, Mirror(fill(tmp_path / "good")) as second:
        assert download_mnist(target, (first, second), sums) == target
        assert len(mnist().train) == 50, "the cache is looked into"
        before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
        download_mnist(target, (), sums)
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before
    assert sorted(before) == sorted(f"{part}.gz" for part in PARTS), "and no half files"


def test_a_failed_download_leaves_nothing(tmp_path: Path) -> None:
    with Mirror(tmp_path) as empty, pytest.raises(UserError) as raised:
        download_mnist(tmp_path / "target", (empty, "http://127.0.0.1:1/"))
    assert "404" in one_line(raised.value)
    assert "127.0.0.1:1" in str(raised.value)
    assert not (tmp_path / "target").exists()


def test_digits_do_not_import_scikit_learn() -> None:
    code = "import sys; from elastune.recipes.datasets import digits; digits(); sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


DATA = os.environ.get("ELASTUNE_DATA")


def test_real_mnist_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with the real files they are MNIST's; without them the built ones above stand in."""
    folder = find("mnist", Path(DATA)) if DATA else None
    if folder is None:
        print("no MNIST in ELASTUNE_DATA: nothing to compare")
        return
    for part, wanted in zip(PARTS, MNIST_SHA256, strict=True):
        file = next(f for f in (folder / part, folder / f"{part}.gz") if f.exists())
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        assert hashlib.sha256(content).hexdigest() == wanted
    began = time.monotonic()
    splits = mnist(folder)
    print(f"loaded in {time.monotonic() - began:.2f} s")
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [50_000, 10_000, 10_000]
    assert splits.test.tensors[1][:5].tolist() == [7, 2, 1, 0, 4]
