"""How far a disease has gone in a year, by three views of a patient: what measurements is an ensemble worth?

elastune tune examples/views.py --trials 4 --workers 2 --keep all --out study
elastune ensemble study --vary inputs=body,blood,pressure,body+blood --workers 2

442 patients (Efron et al. 2004, "Least angle regression"), which come with scikit-learn.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import elastune

views = {"body": [0, 1, 2], "pressure": [3], "blood": [4, 5, 6, 7, 8, 9]}  # columns; body: age, sex, mass index
config = {"inputs": list(views), "lr": 0.02, "width": 16, "epochs": 20, "batch_size": 16}
objectives = {"error": "min"}


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.003, 0.1, log=True), "width": trial.suggest_int("width", 8, 32)}


def patients():
    """222 to train, 110 to choose by, 110 to judge."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(x, dtype=torch.float32)[order] * 20
    targets = torch.tensor((y - 152) / 77, dtype=torch.float32).reshape(-1, 1)[order]
    return [TensorDataset(inputs[a:b], targets[a:b]) for a, b in ((0, 222), (222, 332), (332, 442))]


def build(config):
    view = elastune.InputView(views, config["inputs"])  # of all columns those of the views that this model is shown
    return nn.Sequential(view, nn.Linear(view.width, config["width"]), nn.ReLU(), nn.Linear(config["width"], 1))


def evaluated(session, model, data):
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in session.batches(data, batch_size=55, train=False):
            outputs.append(model(x))
            targets.append(y)
    return outputs, targets


def train(session):
    config = session.config
    training, validation, test = patients()
    model = build(config)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(training, batch_size=config["batch_size"]):
            session.backward(F.mse_loss(model(x), y))
            session.clip_grad_norm_(5.0)
            optimizer.step()
            optimizer.zero_grad()
        outputs, targets = evaluated(session, model, validation)
        error = session.mean([((o - t) ** 2).flatten() for o, t in zip(outputs, targets, strict=True)])
        session.report(error=error, evaluated_on={"error": len(validation)})
    session.predictions("validation", outputs, targets)
    session.predictions("test", *evaluated(session, model, test))
