"""A study on workers that nobody has: how would 2,048 of them be used?

elastune simulate examples/simulated.py --workers 2048 --trials 500 --sampler random
elastune simulate examples/simulated.py --workers 256 --trials 200 --sampler random --stopping asha --trial-workers 1:16

The learning curves are made up, with what makes such searches hard: a learning rate that is too high diverges, a wide
model learns more but takes longer, and adding workers to a small batch soon brings nothing.
"""

import math

config = {"lr": 0.01, "width": 64, "batch_size": 256}
objectives = {"error": "min", "seconds": "min"}
EPOCHS = 12


def space(trial):
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "width": trial.suggest_int("width", 16, 512, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [128, 256, 512, 1024]),
    }


def surrogate(config, workers):
    """Of each epoch: seconds on this many workers, and what is reported after it."""
    width, batch = config["width"], config["batch_size"]
    step_s = 1e-4 * width * batch / workers / 256 + 0.002 * math.log2(2 * workers)
    too_far = math.log10(config["lr"] / (0.02 * batch / 256)) ** 2
    for epoch in range(1, EPOCHS + 1):
        floor = 0.4 / math.sqrt(width)
        error = floor + 0.05 * too_far + 0.5 * math.exp(-epoch * (1 + config["lr"]) / 4)
        diverged = config["lr"] > 0.5 and epoch > 2
        yield 50_000 / batch * step_s, {"error": math.nan if diverged else error}
