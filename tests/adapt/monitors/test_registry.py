"""Every monitor keeps the contract, and is found by its name and options."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

import pytest

from elastune.adapt.monitors.base import Monitor
from elastune.adapt.monitors.curvature import Curvature
from elastune.adapt.monitors.noise_scale import NoiseScale, PreconditionedNoiseScale
from elastune.adapt.monitors.performance import Performance
from elastune.adapt.monitors.registry import MONITORS, Loss, choose, parse
from elastune.core import plugins
from elastune.core.errors import UserError
from elastune.testing.kits.monitor import MonitorKit


class TestNoiseScale(MonitorKit):
    def make(self) -> Monitor:
        return NoiseScale()


class TestPreconditionedNoiseScale(MonitorKit):
    def make(self) -> Monitor:
        return PreconditionedNoiseScale()


class TestPerformance(MonitorKit):
    def make(self) -> Monitor:
        return Performance()


class TestCurvature(MonitorKit):
    def make(self) -> Monitor:
        return Curvature()


class TestLoss(MonitorKit):
    def make(self) -> Monitor:
        return Loss()


@dataclass(frozen=True)
class Odd(Loss):
    """Another package's."""

    name = "odd"


def install(monkeypatch: pytest.MonkeyPatch, *points: metadata.EntryPoint) -> None:
    offered = metadata.EntryPoints(points)
    monkeypatch.setattr(plugins, "entry_points_of", lambda group: offered.select(group=group))


def test_every_monitor_is_known_by_its_name() -> None:
    assert set(MONITORS) == {"noise_scale", "noise_scale_adam", "performance", "curvature", "loss"}
    for name, kind in MONITORS.items():
        assert parse(name) == kind()
        assert parse(name).name == name


def test_options_reach_the_monitor() -> None:
    assert parse("noise_scale:every=10,memory=50") == NoiseScale(every=10, memory=50.0)
    assert parse(" curvature : every = 7 ") == Curvature(every=7)
    assert parse("performance:factor=2,patience=3,memory=9") == Performance(factor=2.0, patience=3, memory=9)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "written NAME"),
        (":every=1", "written NAME"),
        ("gns", "noise_scale, noise_scale_adam, performance, curvature, loss"),
        ("noise_scale:", "NAME:OPTION=VALUE"),
        ("noise_scale:every", "OPTION=VALUE"),
        ("noise_scale:every=", "OPTION=VALUE"),
        ("noise_scale:every=1,", "OPTION=VALUE"),
        ("noise_scale:every=1,every=2", "may be given once"),
        ("noise_scale:often=1", "no such option .*every, memory"),
        ("noise_scale:name=x", "no such option"),
        ("noise_scale:every=ten", "a whole number"),
        ("noise_scale:every=1.5", "a whole number"),
        ("noise_scale:every=0", "at least 1"),
        ("noise_scale:memory=1", "at least 2"),
        ("noise_scale:memory=nan", "at least 2"),
        ("noise_scale:memory=inf", "at least 2"),
        ("noise_scale:memory=much", "a number of at least 2"),
        ("loss:memory=0.5", "at least 1"),
        ("performance:factor=1", "above 1"),
        ("performance:factor=nan", "above 1"),
        ("performance:patience=0", "a whole number of at least 1"),
        ("performance:memory=2.5", "a whole number"),
        (3, "given as a text"),
    ],
)
def test_rubbish_is_refused_in_words(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse(text)


def test_one_monitor_of_each_name_and_explicit_options_win() -> None:
    chosen = choose(["performance", "noise_scale", "noise_scale:every=10", "noise_scale", "performance"])
    assert chosen == (Performance(), NoiseScale(every=10))
    assert choose(["loss:memory=5", "loss", "loss:memory=5.0"]) == (Loss(memory=5.0),)
    assert choose([]) == ()
    with pytest.raises(UserError, match="one set of options"):
        choose(["noise_scale:every=10", "noise_scale:memory=50"])


def test_installed_packages_bring_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, metadata.EntryPoint("odd", f"{__name__}:Odd", "elastune.monitors"))
    assert parse("odd:memory=3") == Odd(memory=3.0)
    with pytest.raises(UserError, match="loss, odd"):
        parse("even")


@pytest.mark.parametrize(
    "target", ["nowhere.at.all:Odd", "collections:OrderedDict", "elastune.adapt.monitors.registry:Loss"]
)
def test_installed_monitors_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    install(monkeypatch, metadata.EntryPoint("odd", target, "elastune.monitors"))
    with pytest.raises(UserError, match="an installed monitor"):
        parse("odd")


def test_choosing_needs_no_torch() -> None:
    """A command line that only checks its options stays quick."""
    code = "import sys, elastune.adapt.monitors.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
