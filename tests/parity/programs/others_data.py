"""Data of other packages in a session's loop, as it is: Hugging Face's data sets, tar files that WebDataset reads."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from elastune.testing.faults import inject

config = {"kind": "map", "folder": "", "faults": []}
COUNT = 50


def write_tars(folder: Path) -> None:
    """Five files of ten samples each: a number, and what is to be said of it."""
    for shard in range(5):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for number in range(shard * 10, shard * 10 + 10):
                for name, text in (("id", number), ("cls", number % 3)):
                    member = tarfile.TarInfo(f"{number:04}.{name}")
                    member.size = len(str(text))
                    tar.addfile(member, io.BytesIO(str(text).encode()))


def raw_tars(folder: str) -> Any:
    import webdataset

    urls = sorted(str(path) for path in Path(folder).glob("*.tar"))
    return webdataset.WebDataset(urls, nodesplitter=None, shardshuffle=False).decode()


def tars(folder: str) -> Any:
    return raw_tars(folder).shuffle(20, rng=random).map(lambda sample: {"id": int(sample["id"]), "cls": sample["cls"]})


def hugging(streams: bool) -> Any:
    import datasets

    datasets.disable_progress_bars()
    held = datasets.Dataset.from_dict({"id": list(range(COUNT)), "cls": [number % 3 for number in range(COUNT)]})
    if not streams:
        return held.map(lambda sample: {"cls": sample["cls"] * 1}).with_format("torch")
    return held.to_iterable_dataset(num_shards=5).shuffle(seed=1, buffer_size=8).map(lambda sample: sample)


def opened(kind: str, folder: str) -> Any:
    return tars(folder) if kind == "tars" else hugging(kind == "stream")


def train(session) -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    reach, seen = inject(session), session.config.get("seen")
    for _ in session.epochs(2):
        for batch in session.batches(opened(session.config["kind"], session.config["folder"]), batch_size=16):
            x = torch.stack([batch["id"] / COUNT, batch["cls"].float()], 1)
            reach("before")
            session.backward(mse_loss(model(x), x.sum(1, keepdim=True).sin()))
            reach("after")
            optimizer.step()
            optimizer.zero_grad()
            if seen is not None:
                seen.append(batch["id"].tolist())
