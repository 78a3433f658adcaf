"""Situations of training programs, as data: a plain loop, the same loop with elastune's calls, and what comes of them.

Each differs from one small classification by a few lines. ``Situation.plain`` and ``Situation.program`` are whole files
whose loops are alike but for the four calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cell = Literal["equal", "otherwise", "refused"]

_TOP = """
import argparse
import copy
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data import random_split

x = torch.arange(384.0).reshape(48, 8).mul(1.7).sin()
y = (x.sum(1) > 0).long()
data = TensorDataset(x, y)
{top}


def make():
    torch.manual_seed(5)
    return {model}


"""
_PLAIN = """
def main():
    model = make()
    optimizer = {optimizer}
    loader = {loader}
    {before}
    {restored}
    for epoch in range(4):
        for {batch} in {numbered_loader}:
            {loss}
            {backward}
            {step}
            {each}
        {after}


if __name__ == "__main__":
    main()
"""
_PROGRAM = """
def train(session):
    model = make()
    optimizer = {optimizer}
    loader = {loader}
    {before}
    {prepare}
    {tracked}
    for epoch in session.epochs(4):
        for {batch} in {numbered_batches}:
            {loss}
            {session_backward}
            {step}
            {each}
        {after}
        session.report(loss=session.loss)
        {session_after}
"""
STEP = "optimizer.step()\noptimizer.zero_grad()"
NET = "nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))"


@dataclass(frozen=True)
class Situation:
    """One kind of program.

    Attributes:
        name: What it shows.
        verdict: What ``check`` names, of findings that are mistakes, sorted; empty: nothing.
        noted: What it notes besides.
        one_slot: The plain loop and the program in one slot, on one worker.
        four_slots: One slot and four slots on one worker.
        two_workers: Four slots on one worker and on two.
        resumed: Four slots at once, and cut and resumed.
        top, model, optimizer, loader, before, loss, backward, step, each, after: Lines of both forms.
        batch: The variables of a batch.
        numbered: The loop enumerates its batches.
        prepare, tracked, batches, session_backward, session_after: Of the program alone.
        restored: Of the plain loop alone.
    """

    name: str
    verdict: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    one_slot: Cell = "equal"
    four_slots: Cell = "equal"
    two_workers: Cell = "equal"
    resumed: Cell = "equal"
    top: str = ""
    model: str = NET
    optimizer: str = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
    loader: str = "DataLoader(data, batch_size=8, shuffle=True)"
    before: str = "pass"
    loss: str = "loss = F.cross_entropy(model(b), t)"
    backward: str = "loss.backward()"
    step: str = STEP
    each: str = "pass"
    after: str = "pass"
    batch: str = "b, t"
    numbered: bool = False
    prepare: str = "model, optimizer = session.prepare(model, optimizer)"
    session_backward: str = "session.backward(loss)"
    session_after: str = "pass"
    batches: str = "session.batches(loader)"
    tracked: str = "pass"
    restored: str = "pass"

    def _text(self, form: str) -> str:
        batch = f"i, ({self.batch})" if self.numbered else self.batch
        parts = {
            "optimizer": self.optimizer,
            "loader": self.loader,
            "before": _indented(self.before, 4),
            "prepare": _indented(self.prepare, 4),
            "tracked": _indented(self.tracked, 4),
            "restored": _indented(self.restored, 4),
            "batch": batch,
            "numbered_loader": "enumerate(loader)" if self.numbered else "loader",
            "numbered_batches": f"enumerate({self.batches})" if self.numbered else self.batches,
            "loss": _indented(self.loss, 12),
            "backward": _indented(self.backward, 12),
            "session_backward": _indented(self.session_backward, 12),
            "step": _indented(self.step, 12),
            "each": _indented(self.each, 12),
            "after": _indented(self.after, 8),
            "session_after": _indented(self.session_after, 8),
        }
        return _TOP.format(top=self.top, model=self.model) + form.format(**parts)

    @property
    def plain(self) -> str:
        """The plain script."""
        return self._text(_PLAIN)

    @property
    def program(self) -> str:
        """The same with elastune's calls."""
        return self._text(_PROGRAM)


def _indented(lines: str, spaces: int) -> str:
    return lines.replace("\n", "\n" + " " * spaces)


NORMED = "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))"
DROPPED = "nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))"
VAE = """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(drawn), mean, log_variance
"""
VAE_LOSS = """out, mean, log_variance = model(b)
loss = F.mse_loss(out, b, reduction="sum")
loss = loss - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())"""
WORDS = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, words):
        return self.out(self.rnn(self.embed(words))[0])


words = torch.arange(48 * 7).mul(7).remainder(11).reshape(48, 7)
data = TensorDataset(words[:, :-1], words[:, 1:].where(words[:, 1:] % 4 > 0, -100))
"""
WORD_LOSS = "loss = F.cross_entropy(model(b).flatten(0, 1), t.flatten(), ignore_index=-100)"
CONTRAST = """z = F.normalize(model(b), dim=1)
loss = F.cross_entropy(5 * z @ z.T, torch.arange(len(b)))"""
CONTRAST_LOSS = """
def contrast(z):
    return F.cross_entropy(5 * z @ z.T, torch.arange(len(z)))
"""
GAN_BEFORE = """gen, disc = model[0], model[1]
opt_d = torch.optim.SGD(disc.parameters(), lr=0.05)
opt_g = torch.optim.SGD(gen.parameters(), lr=0.05)"""
GAN_PLAIN = """(disc(b).sigmoid().log() + (1 - disc(gen(b).detach()).sigmoid()).log()).mean().neg().backward()
opt_d.step()
opt_d.zero_grad()
disc(gen(b)).sigmoid().log().mean().neg().backward()
opt_g.step()
opt_g.zero_grad()
opt_d.zero_grad()"""
GAN_PROGRAM = """if session.turn == 0:
    loss = (disc(b).sigmoid().log() + (1 - disc(gen(b).detach()).sigmoid()).log()).mean().neg()
    session.backward(loss, disc)
    opt_d.step()
    opt_d.zero_grad()
else:
    session.backward(disc(gen(b)).sigmoid().log().mean().neg(), gen)
    opt_g.step()
    opt_g.zero_grad()"""
PADDED = """own = DistributedSampler(range(45), session.size, session.rank, shuffle=False)
session.report(seen=session.sum(len(list(own))))"""
SUM = "loss = F.cross_entropy(model(b), t, reduction='sum')"
MIXUP = """mixed = torch.randperm(len(b))
loss = 0.7 * F.cross_entropy(model(0.7 * b + 0.3 * b[mixed]), t) + 0.3 * F.cross_entropy(model(b), t[mixed])"""
SIAMESE = """left, right = b[:, :4], b[:, 4:]
apart = F.pairwise_distance(model(left), model(right))
loss = (t * apart.square() + (1 - t) * F.relu(1 - apart).square()).mean()"""
EMA = "averages = {name: p.detach().clone() for name, p in model.named_parameters()}"
EMA_EACH = """with torch.no_grad():
    for name, p in model.named_parameters():
        averages[name].lerp_(p, 0.1)"""
GROUPS = """torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ], lr=0.01)"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n" + STEP
PLATEAU = "schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)"
AUTOCAST = """with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = F.cross_entropy(model(b).float(), t)"""
NOISY = """
class Noisy(Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        return x[i] + 0.1 * torch.randn(8), y[i]


data = Noisy()
"""
UNSEEDED_TOP = "data = TensorDataset(x + random.SystemRandom().random(), y)"
SMOOTH = "loss = F.cross_entropy(model(b), t, label_smoothing=0.1)"
WEIGHTED = "loss = F.cross_entropy(model(b), t, weight=torch.tensor([1.0, 3.0]))"
PENALTY = """loss = F.cross_entropy(model(b), t)
loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())"""
HALVED = "loss = F.cross_entropy(model(b), t) * (1.0 if seen < 5 else 0.5)\nseen += 1"
VALIDATED = """model.eval()
with torch.no_grad():
    score = F.cross_entropy(model(x), y).item()
model.train()
if score < best:
    best = score
    kept = copy.deepcopy(model.state_dict())"""

SITUATIONS = (
    # The loops of tutorials: the same everywhere.
    Situation("classification"),
    Situation("a last batch that is short", loader="DataLoader(data, batch_size=10, shuffle=True)"),
    Situation("in order", loader="DataLoader(data, batch_size=8)"),
    Situation("the last batch left out", loader="DataLoader(data, batch_size=10, shuffle=True, drop_last=True)"),
    Situation("label smoothing", loss=SMOOTH),
    Situation("AdamW with groups of weight decay", optimizer=GROUPS),
    Situation("gradient clipping", step=CLIP),
    Situation("autocast", loss=AUTOCAST),
    Situation("siamese pairs", model="nn.Linear(4, 3)", loss=SIAMESE),
    Situation("a sum divided by the batch", loss="loss = F.cross_entropy(model(b), t, reduction='sum') / len(b)"),
    Situation(
        "a penalty of the weights",
        loss=PENALTY,
    ),
    Situation("transforms that draw", top=NOISY),
    Situation(
        "a weighted sampler",
        loader="DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(torch.arange(1.0, 49.0), 40))",
    ),
    Situation(
        "a split by a seeded generator",
        top="data, rest = random_split(data, [40, 8], torch.Generator().manual_seed(3))",
    ),
    # Layers: no mistake, and noted.
    Situation("dropout", noted=("dropout",), four_slots="otherwise", model=DROPPED),
    Situation("BatchNorm", noted=("BatchNorm",), four_slots="otherwise", model=NORMED),
    # Losses.
    Situation("a sum", ("sum",), four_slots="otherwise", loss=SUM),
    Situation(
        "a VAE",
        ("sum",),
        four_slots="otherwise",
        top=VAE,
        model="VAE()",
        loss=VAE_LOSS,
        optimizer="torch.optim.Adam(model.parameters(), lr=1e-3)",
    ),
    Situation(
        "a word model with padding",
        ("unequal mean",),
        four_slots="otherwise",
        top=WORDS,
        model="Words()",
        loss=WORD_LOSS,
    ),
    Situation("class weights", ("unequal mean",), four_slots="otherwise", loss=WEIGHTED),
    Situation("a contrastive loss", ("samples",), four_slots="otherwise", loss=CONTRAST),
    Situation(
        "statistics of the batch",
        ("samples",),
        four_slots="otherwise",
        loss="loss = F.cross_entropy(model(b), t) + model(b).var(0).mean()",
    ),
    # The same, said: equal again.
    Situation("a sum, said", loss=SUM, session_backward="session.backward(loss, reduction='sum')"),
    Situation(
        "a word model with padding, counted",
        top=WORDS,
        model="Words()",
        loss=WORD_LOSS,
        session_backward="session.backward(loss, count=(t != -100).sum())",
    ),
    Situation(
        "class weights, counted",
        loss=WEIGHTED,
        session_backward="session.backward(loss, count=torch.tensor([1.0, 3.0])[t].sum())",
    ),
    Situation(
        "a contrastive loss, gathered",
        top=CONTRAST_LOSS,
        loss="z = F.normalize(model(b), dim=1)",
        backward="contrast(z).backward()",
        session_backward="session.backward_global(contrast, lambda b: F.normalize(model(b), dim=1), b)",
    ),
    Situation("MixUp", noted=("draws",), four_slots="otherwise", loss=MIXUP),
    # Loops.
    Situation(
        "a counter of batches in a log",
        noted=("passes", "variables"),
        numbered=True,
        each="if i % 10 == 0:\n    print(i, float(loss.detach()))",
    ),
    Situation(
        "a running sum in a log", noted=("variables",), before="total = 0.0", each="total += loss.item() * len(b)"
    ),
    Situation(
        "a counter that changes the loss",
        ("metric", "passes", "resume", "workers"),
        four_slots="otherwise",
        two_workers="otherwise",
        resumed="otherwise",
        before="seen = 0",
        loss=HALVED,
    ),
    Situation(
        "accumulation by hand",
        ("fails",),
        one_slot="refused",
        four_slots="refused",
        two_workers="refused",
        resumed="refused",
        numbered=True,
        loss="loss = F.cross_entropy(model(b), t) / 4",
        step="if (i + 1) % 4 == 0:\n    optimizer.step()\n    optimizer.zero_grad()",
    ),
    # State.
    Situation(
        "StepLR, prepared",
        before="schedule = StepLR(optimizer, 2, 0.5)",
        after="schedule.step()",
        prepare="model, optimizer, schedule = session.prepare(model, optimizer, schedule)",
    ),
    Situation("StepLR, found", before="schedule = StepLR(optimizer, 2, 0.5)", after="schedule.step()"),
    Situation(
        "OneCycleLR in the batch loop",
        before="schedule = OneCycleLR(optimizer, 0.2, total_steps=24)",
        each="schedule.step()",
        prepare="model, optimizer, schedule = session.prepare(model, optimizer, schedule)",
    ),
    Situation(
        "CosineAnnealingLR, prepared",
        before="schedule = CosineAnnealingLR(optimizer, 4)",
        after="schedule.step()",
        prepare="model, optimizer, schedule = session.prepare(model, optimizer, schedule)",
    ),
    Situation("an average of the weights by hand", before=EMA, each=EMA_EACH),
    Situation("the best so far by a variable", noted=("variables",), before="best = 1e9", after=VALIDATED),
    Situation(
        "early stopping by a variable", noted=("variables",), before="bad = 0", after="bad += 1\nif bad > 9:\n    break"
    ),
    Situation(
        "data drawn at import without a seed",
        ("fails on two workers", "random"),
        one_slot="otherwise",
        four_slots="otherwise",
        two_workers="refused",
        resumed="refused",
        top=UNSEEDED_TOP,
    ),
    Situation(
        "a GAN with a turn for each optimizer",
        model="nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])",
        optimizer="None",
        before=GAN_BEFORE,
        prepare="gen, disc, opt_d, opt_g = session.prepare(gen, disc, opt_d, opt_g)",
        batches="session.batches(loader, turns=2)",
        loss="pass",
        backward=GAN_PLAIN,
        session_backward=GAN_PROGRAM,
        step="pass",
    ),
    Situation(
        "a second pass before the step, as SAM has it",
        ("fails",),
        one_slot="refused",
        four_slots="refused",
        two_workers="refused",
        resumed="refused",
        step="F.cross_entropy(model(b + 0.01), t).backward()\n" + STEP,
        session_backward="session.backward(loss)\nsession.backward(F.cross_entropy(model(b + 0.01), t))",
    ),
    # Workers.
    Situation(
        "its own slices of a batch",
        ("metric", "workers"),
        two_workers="otherwise",
        tracked="rank, size = session.rank, session.size",
        restored="rank, size = 0, 1",
        loss="loss = F.cross_entropy(model(b[rank::size]), t[rank::size])",
    ),
    Situation(
        "an evaluation that counts padding twice",
        ("metric",),
        session_after=PADDED,
    ),
    Situation(
        "a loss times the rank",
        ("metric", "workers"),
        two_workers="otherwise",
        prepare="model, optimizer = session.prepare(model, optimizer)\nscale = 1 + session.rank",
        loss="loss = F.cross_entropy(model(b), t) * scale",
        restored="scale = 1",
    ),
    Situation(
        "a seed by the rank",
        ("metric", "workers"),
        noted=("dropout",),
        four_slots="otherwise",
        two_workers="otherwise",
        model=DROPPED,
        tracked="rank = session.rank",
        restored="rank = 0",
        loss="torch.manual_seed(rank)\nloss = F.cross_entropy(model(b), t)",
    ),
)
