import contextlib
from importlib.metadata import EntryPoint, EntryPoints
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.base import Policy
from elastune.adapt.policies.host import Bounds, ChangeBudget, Cooldown, Patience
from elastune.adapt.policies.library import registry
from elastune.adapt.policies.library.gns import GrowWithNoise
from elastune.adapt.policies.library.registry import POLICIES, build, build_all, monitors_for, split_policy
from elastune.adapt.policies.library.schedules import ScheduledBatch
from elastune.core import plugins
from elastune.core.errors import UserError
from elastune.core.options import options_of

NEEDED = {
    "scheduled_batch": "at=1",
    "scheduled_workers": "at=1,workers=2",
    "warmup": "steps=5",
    "cost": "cap=1.0,price_per_worker_hour=0.5",
    "spot": "deadline_h=20,prices=prices.csv",
}


class Mine(Policy):
    monitors = ("loss", "noise_scale")

    def __init__(
        self,
        at: tuple[float, ...] = (),
        *,
        most: int | None = 3,
        how: Literal["up", "down"] = "up",
        loud: bool = False,
        rate=0.5,
        names: tuple[str, ...] = (),
        model: object = None,
    ):
        self.given = (at, most, how, loud, rate, names, model)


class Bare(Policy):
    pass


class Refuses(Policy):
    def __init__(self, level: int):
        if level > 2:
            raise ValueError("too high a level")


class Looks(Policy):
    def __init__(self, every: int = 10):
        self.every = every


class NeedsAnObject(Policy):
    def __init__(self, model: object):
        self.model = model


OWN = {kind.__name__: kind for kind in (Mine, Bare, Refuses, Looks, NeedsAnObject)}


# -- text --------------------------------------------------------------------------------------------------------------


def test_a_text_is_a_name_and_options():
    assert split_policy(" gns:max_batch=2048, lr = sqrt ") == ("gns", "max_batch=2048, lr = sqrt")
    assert split_policy("gns") == ("gns", "")


@pytest.mark.parametrize(
    "text",
    ["", ":", "gns:", "gns:a", "gns:a=", "gns:=1", "gns:a=1,", "gns:a=1,a=2", "g ns", "gns:a b=1", "1:a=1", "x" * 2000],
)
def test_rubbish_is_refused(text):
    with pytest.raises(UserError):
        build(text)


@given(
    st.sampled_from(["", "Mine:", "Mine:at=", "Mine:most=", "Mine:loud=1,how=", "gns:max_batch="]), st.text(max_size=30)
)
def test_any_text_is_a_policy_or_a_user_error(start, text):
    with contextlib.suppress(UserError):
        assert isinstance(build(start + text, OWN).policy, Policy)


def test_values_have_the_types_of_the_constructor():
    policy = build("Mine:at=1/2.5,most=none,how=down,loud=True,rate=2,names=a/b", OWN).policy
    assert policy.given == ((1.0, 2.5), None, "down", True, 2.0, ("a", "b"), None)
    assert build("Mine:most=-7", OWN).policy.given == ((), -7, "up", False, 0.5, (), None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Mine:most=1.5", "whole number"),
        ("Mine:most=1e3", "whole number"),
        ("Mine:at=1//2", "a number, or several as a/b .got '1//2'"),
        ("Mine:rate=nan", "number"),
        ("Mine:rate=inf", "number"),
        ("Mine:how=sideways", "up, down"),
        ("Mine:loud=1", "true or false"),
        ("Mine:model=x", "no such option"),
        ("Mine:mots=1", "known: .*budget.*most"),
        ("Bare:x=1", "known: budget"),
        ("Refuses", "needs level"),
        ("Refuses:level=3", "too high a level"),
        ("NeedsAnObject", "annotate"),
        ("scheduled_batch", "needs at"),
        ("nobody", "gns.*, or define a class"),
        ("gns:factor=0.5", "factor >= 1"),
        ("gns:cooldown=-1", "cooldown must be at least 0"),
        ("Looks:patience=2", "every few steps"),
    ],
)
def test_what_is_wrong_is_told(text, said):
    with pytest.raises(UserError, match=said):
        build(text, OWN)


def test_annotations_that_cannot_be_read_are_told():
    class Odd(Policy):
        def __init__(self, x: "Nowhere"):  # noqa: F821
            pass

    with pytest.raises(UserError, match="Nowhere"):
        options_of(Odd)


# -- policies and guards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_made_and_guarded(name):
    text = f"{name}:{NEEDED[name]}" if name in NEEDED else name
    assert issubclass(POLICIES[name], Policy)
    assert isinstance(build(text).policy, POLICIES[name])
    guarded = build(f"{text}{',' if name in NEEDED else ':'}cooldown=7,budget=2")
    assert {type(guard) for guard in guarded.guards} >= {Cooldown, ChangeBudget}


def test_guards_only_where_they_are_asked_for():
    assert isinstance(build("scheduled_batch:at=1").policy, ScheduledBatch)
    assert build("scheduled_batch:at=1").guards == ()
    guarded = build("scheduled_batch:at=1,max_batch=512,min_workers=2")
    assert guarded.guards == (Bounds(max_batch=512, min_workers=2),)


def test_an_option_of_the_policy_is_its_own():
    found = build("gns:max_batch=2048")
    assert found.policy.max_batch == 2048
    assert not any(isinstance(guard, Bounds) for guard in found.guards)


def test_default_guards_can_be_overridden():
    assert build("gns").guards == (Patience(3), Cooldown(20))
    assert build("gns:cooldown=100,patience=1").guards == (Patience(1), Cooldown(100))
    assert GrowWithNoise.default_guards == {"patience": 3, "cooldown": 20}


def test_the_programs_own_come_first():
    class Gns(Policy):
        pass

    assert isinstance(build("gns", {"gns": Gns}).policy, Gns)


def test_each_gets_a_name_of_its_own():
    found = build_all(["warmup:steps=3", "gns", "warmup:steps=5", "Bare", "warmup:steps=7"], OWN)
    assert [named.name for named in found] == ["warmup", "gns", "warmup-2", "Bare", "warmup-3"]
    assert [named.policy.steps for named in found if named.name.startswith("warmup")] == [3, 5, 7]


def test_monitors_are_named_once():
    policies = [build("gns"), build("Mine", OWN), build("warmup:steps=3"), build("adascale")]
    assert monitors_for(policies) == ("noise_scale", "loss")
    assert monitors_for([]) == ()


# -- third parties -----------------------------------------------------------------------------------------------------


def test_entry_points(monkeypatch):
    theirs = EntryPoints(
        [
            EntryPoint("theirs", "fractions:Fraction", registry.INSTALLED.group),
            EntryPoint("gns", "fractions:Fraction", registry.INSTALLED.group),
            EntryPoint("good", "elastune.adapt.policies.library.warmup:WarmUp", registry.INSTALLED.group),
        ]
    )
    monkeypatch.setattr(plugins, "entry_points_of", lambda group: theirs.select(group=group))
    assert build("good:steps=4").policy.steps == 4
    assert isinstance(build("gns").policy, GrowWithNoise)  # nobody takes a name of the library's
    with pytest.raises(UserError, match="subclass of elastune.adapt.policies.base.Policy"):
        build("theirs")
    with pytest.raises(UserError, match="good"):
        build("nobody")
