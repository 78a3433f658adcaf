"""Files of models: whatever bit is another one than was written, the file is refused; so is what contradicts itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from safetensors.torch import save_file

import elastune
from elastune.core.errors import UserError
from elastune.tuning.reuse.saved_models import DIGEST, KEY, read_model_file, write_model_file


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Content:
    """What the header tells."""

    format: Literal[2]
    names: list[str]


WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7), "mask": torch.tensor([0, -torch.inf])}
CONTENT = {"format": 2, "names": ['a "sha256":"' + "0" * 64 + '"', "\u202e"]}
HIDDEN = torch.nn.Linear(2, 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_model_file(path, CONTENT, WEIGHTS)
    return path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        read_model_file(path, Content, "a model")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_was_written_is_read(file: Path) -> None:
    content, tensors = read_model_file(file, Content, "a model")
    assert content == Content(2, CONTENT["names"])  # type: ignore[arg-type]
    assert tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)


def test_every_other_bit_is_found(file: Path) -> None:
    content = file.read_bytes()
    with file.open("r+b", buffering=0) as opened:
        for at, byte in enumerate(content):
            for bit in range(8):
                os.pwrite(opened.fileno(), bytes([byte ^ 1 << bit]), at)
                refused(file)
            os.pwrite(opened.fileno(), bytes([byte]), at)
    read_model_file(file, Content, "a model")


def test_every_cut_and_every_addition_is_found(file: Path) -> None:
    content = file.read_bytes()
    for changed in (*(content[:at] for at in range(len(content))), content + b"\0", content + content, b"\xff" * 99):
        file.write_bytes(changed)
        refused(file)
    file.unlink()
    refused(file)
    refused(file.parent)


def test_a_file_without_a_digest_is_refused(tmp_path: Path) -> None:
    for metadata in (None, {KEY: "{}"}, {DIGEST: "0" * 64}, {KEY: "{}", DIGEST: "0" * 64}):
        save_file({"w": torch.ones(1)}, tmp_path / "other", metadata)
        refused(tmp_path / "other")


@pytest.mark.parametrize("content", [{}, {"format": 1, "names": []}, {"format": 2, "names": 3}, {**CONTENT, "more": 1}])
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    write_model_file(tmp_path / "m", content, WEIGHTS)
    refused(tmp_path / "m")


def test_nan_is_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"w": torch.tensor([1.0, torch.nan])}
    with pytest.raises(UserError, match="NaN in w"):
        write_model_file(tmp_path / "m", CONTENT, bad)
    monkeypatch.setattr("elastune.tuning.reuse.saved_models.not_numbers", lambda tensors: None)
    write_model_file(tmp_path / "m", CONTENT, bad)
    monkeypatch.undo()
    assert "NaN in w" in refused(tmp_path / "m")


def ensemble_file(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """An ensemble of one linear model that was written with these changes, and a right digest."""
    members = [{"trial": 3, "weight": 1.0, "config": {"width": 3}}]
    content = {
        "format": 2,
        "kind": "classification",
        "output_kind": "logits",
        "width": 3,
        "members": members,
        "about": {},
    }
    own = {f"0.{name}": tensor for name, tensor in HIDDEN.state_dict().items()}
    write_model_file(path, {**content, **changes}, own if tensors is None else tensors)
    return path


def build(config: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Linear(2, config["width"])


def wrong_ensembles() -> Iterator[tuple[dict[str, Any], str]]:
    member = {"trial": 0, "weight": 1.0, "config": {}}
    weight, bias = HIDDEN.weight.detach(), HIDDEN.bias.detach()
    yield {"width": 10**18}, "width"
    yield {"width": 0}, "width"
    yield {"kind": "regression"}, "logits of a regression"
    yield {"output_kind": "values"}, "values of a classification"
    yield {"members": [{**member, "weight": 0.2}]}, "add up to 0.2"
    yield {"members": [{**member, "weight": float("nan")}]}, "members.0.weight"
    yield {"members": []}, "members"
    yield (
        {"tensors": {"0.weight": weight, "0.bias": bias, "1.bias": bias.clone()}},
        "1.bias belongs to none of its 1 members",
    )
    yield {"tensors": {"0.weight": weight, "0.bias": torch.ones(3, dtype=torch.int32)}}, "torch.int32"


@pytest.mark.parametrize(("changes", "words"), list(wrong_ensembles()))
def test_an_ensemble_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        elastune.load_ensemble(ensemble_file(tmp_path / "e", **changes), build)
    assert words in str(error.value)


def test_precision_may_differ(tmp_path: Path) -> None:
    halves = {f"0.{name}": tensor.bfloat16() for name, tensor in HIDDEN.state_dict().items()}
    model = elastune.load_ensemble(ensemble_file(tmp_path / "e", halves), build)
    assert model(torch.zeros(1, 2)).shape == (1, 3)


def broken(config: dict[str, Any]) -> torch.nn.Module:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda config: build({}), "KeyError: 'width'"),
        (lambda config: torch.nn.Linear(**config), "TypeError"),
        (lambda config: torch.nn.Linear(2, -config["width"]), "RuntimeError"),
        (broken, "sys.exit(3)"),
        (lambda config: "a model", "torch.nn.Module"),
        (lambda config: torch.nn.Linear(2, 4), "tensor for tensor"),
    ],
)
def test_settings_that_build_does_not_take_are_told(tmp_path: Path, made: Callable[..., Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        elastune.load_ensemble(ensemble_file(tmp_path / "e"), made)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_composed_model_is_refused_by_the_same(tmp_path: Path) -> None:
    part = {"study": "s", "trial": 0, "config": {"width": 2}}
    content = {"format": 2, "form": "joined", "parts": [part], "tree": [[0], [1]], "head": None}
    tensors = {f"models.gate.{name}": one for name, one in torch.nn.Linear(2, 2).state_dict().items()}
    file = tmp_path / "joined"
    write_model_file(file, content, tensors)
    elastune.load_composed(file, build)
    with pytest.raises(UserError, match="KeyError: 'other'"):
        elastune.load_composed(file, lambda config: config["other"])
    whole = file.read_bytes()
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(UserError, match="written"):
            elastune.load_composed(file, build)
    write_model_file(file, {**content, "head": [2, 2]}, tensors)
    with pytest.raises(UserError, match="tree and no head"):
        elastune.load_composed(file, build)
