"""What simulated studies are killed over: two settings, an error that falls over five epochs, some failures."""

from typing import Any

config = {"lr": 0.1, "x": 0.5}
objectives = {"error": "min", "seconds": "min"}


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.001, 1.0, log=True), "x": trial.suggest_float("x", 0.0, 1.0)}


def surrogate(config: dict[str, Any], workers: int) -> list[tuple[float, dict[str, float]]]:
    if config["x"] > 0.95:
        raise ArithmeticError("no luck")
    epoch_s = 10.0 * (1 + config["x"] / 7)
    return [(epoch_s, {"error": abs(config["lr"] - 0.1) + (config["x"] - 0.3) ** 2 + 1 / e}) for e in range(1, 6)]
