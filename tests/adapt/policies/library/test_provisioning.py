import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.adapt.policies.base import Limits
from elastune.adapt.policies.host import PolicyState
from elastune.adapt.policies.library.provisioning import Provisioning, ProvisioningState, Rate, advance, worth
from elastune.core.decisions import Snapshot
from elastune.core.errors import UserError
from elastune.testing.kits.policy import PolicyDriver, PolicyKit, PolicyWorld

RULES = Provisioning(threshold=0.5, add=1, settle=5, retry=100, wait_s=10)


class TestProvisioning(PolicyKit):
    calm = None  # it tries a worker more, whatever is measured

    def make(self):
        return Provisioning(settle=10)


def curve(compute_s, reduce_s):
    """A step that computes ``compute_s`` on one worker, and reduces for ``reduce_s`` a further worker."""

    def step_time(workers, batch):
        return compute_s / workers + reduce_s * (workers - 1), compute_s / workers

    return step_time


def chosen(step_time, low, high, threshold=0.5):
    """Where a climb without noise ends, by definition."""
    rate = {w: Rate(w, 1 / step_time(w, 1)[0]) for w in range(low, high + 1)}
    workers = low
    while workers < high and worth(rate[workers], rate[workers + 1])[0] >= threshold:
        workers += 1
    return workers


@pytest.mark.parametrize(
    ("many", "expected"), [((5, 500), 1), ((8, 800), 1), ((5, 400), 0), ((5, 350), -0.5), ((6, 500), 0.5)]
)
def test_worth_of_added_workers(many, expected):
    assert worth(Rate(4, 400), Rate(*many)) == (pytest.approx(expected), 0)


def test_error_of_the_worth():
    few, many = Rate(4, 400, 4), Rate(6, 500, 5)
    value, error = worth(few, many)
    by_few = worth(Rate(4, 401), many)[0] - value
    by_many = worth(few, Rate(6, 501))[0] - value
    assert error == pytest.approx(((4 * by_few) ** 2 + (5 * by_many) ** 2) ** 0.5, rel=0.01)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("jitter", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("compute_s", "reduce_s"), [(0.4, 0.004), (0.4, 0.02), (0.4, 0.05), (0.1, 0.0), (0.1, 0.2)])
def test_it_ends_at_the_knee_and_stays(compute_s, reduce_s, seed, jitter):
    step_time = curve(compute_s, reduce_s)
    best = chosen(step_time, 1, 16)
    world = PolicyWorld(step_time, Limits(1, 16), workers=1, batch=256, jitter=jitter, seed=seed)
    policy = PolicyDriver(Provisioning(retry=0))
    world.train(policy, 1600)
    assert step_time(world.workers, 256)[0] <= 1.05 * step_time(best, 256)[0]
    assert world.workers - best in ((0, 1) if jitter else (0,)), "noise may keep one more, which is nearly worth it"
    decided, workers = len(world.decisions), world.workers
    world.train(policy, 400)
    assert (len(world.decisions), world.workers) == (decided, workers), "it stays where it has settled"


def test_it_tries_again_after_a_while():
    slow = [0.2]
    world = PolicyWorld(lambda w, b: (0.1 / w + slow[0] * (w - 1), 0.1 / w), Limits(1, 4), workers=1, batch=64)
    policy = PolicyDriver(Provisioning(retry=300))
    world.train(policy, 250)
    assert world.workers == 1
    assert [d.workers for _, d in world.decisions] == [2, 1]
    slow[0] = 0.0  # the network has become better
    world.train(policy, 1000)
    assert world.workers == 4


def test_workers_that_never_come():
    world = PolicyWorld(curve(0.4, 0.0), Limits(1, 8), workers=2, batch=64, free=3)
    policy = PolicyDriver(Provisioning(retry=0, wait_s=5))
    world.train(policy, 1500)
    assert world.workers == 3
    assert [d.workers for _, d in world.decisions] == [3, 4], "it asks once and lets it be"
    world.free = 4
    world.train(policy, 1500)
    assert world.workers == 4, "one that comes late is measured, and the climb goes on"
    assert [d.workers for _, d in world.decisions] == [3, 4, 5]


def test_late_workers_that_bring_nothing_are_given_back():
    world = PolicyWorld(curve(0.1, 0.2), Limits(1, 8), workers=1, batch=64, free=1)
    policy = PolicyDriver(Provisioning(retry=0, wait_s=1))
    world.train(policy, 500)
    assert policy.state.phase == "settled"
    world.free = 8
    world.train(policy, 500)
    assert world.workers == 1
    assert [d.workers for _, d in world.decisions] == [2, 1]


def test_a_lost_worker_changes_nothing():
    world = PolicyWorld(curve(0.4, 0.02), Limits(1, 8), workers=1, batch=64)
    policy = PolicyDriver(Provisioning(retry=0))
    world.train(policy, 1500)
    workers, decided = world.workers, len(world.decisions)
    assert 1 < workers < 8
    world.lose()
    world.train(policy, 500)
    assert (world.workers, len(world.decisions)) == (workers, decided)


@pytest.mark.parametrize("at", [15, 60, 75, 110])
def test_workers_lost_while_it_climbs(at):
    step_time = curve(0.4, 0.01)
    world = PolicyWorld(step_time, Limits(1, 16), workers=3, batch=64)
    policy = PolicyDriver(Provisioning(retry=0, wait_s=60))
    world.train(policy, at)
    world.lose(2)
    world.train(policy, 2500)
    assert world.workers == chosen(step_time, 1, 16)


def test_another_batch_is_measured_anew():
    world = PolicyWorld(lambda w, b: (b * 0.001 / w + 0.03 * (w - 1), b * 0.001 / w), Limits(1, 8), workers=1, batch=64)
    policy = PolicyDriver(Provisioning(retry=0))
    world.train(policy, 800)
    few = world.workers
    world.batch = 1024
    world.train(policy, 1500)
    assert world.workers > few


def test_strides_pass_where_slots_divide_unevenly():
    slots = 8

    def step_time(workers, batch):
        compute_s = 0.1 * -(-slots // workers)
        return compute_s + 0.001, compute_s

    worlds = {add: PolicyWorld(step_time, Limits(1, 8), workers=4, batch=64) for add in (1, 4)}
    for add, world in worlds.items():
        world.train(PolicyDriver(Provisioning(add=add, retry=0)), 1000)
    assert {add: world.workers for add, world in worlds.items()} == {1: 4, 4: 8}


def test_no_more_workers_than_samples_or_limits():
    for limits, batch, end in ((Limits(2, 2), 64, 2), (Limits(1, 8), 3, 3)):
        world = PolicyWorld(curve(0.1, 0.0), limits, workers=2, batch=batch)
        world.train(PolicyDriver(Provisioning()), 900)
        assert world.workers == end


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([32, 64]), st.none() | st.floats(1e-3, 1e6), st.floats(0, 10)),
        min_size=1,
        max_size=80,
    )
)
def test_whatever_happens_it_asks_for_what_is_allowed(history):
    policy, climb = PolicyDriver(Provisioning()), ProvisioningState()
    for step, (workers, batch, per_s, error) in enumerate(history, 1):
        now = Snapshot(step, 0, 0, 0.0, workers, batch, 0.1)
        climb, asked = advance(climb, now, Rate(workers, per_s, error) if per_s else None, 1, 6, RULES)
        assert asked is None or (1 <= asked <= 6 and asked != workers)
        policy.policy_state = PolicyState(climb)
        policy.travel_to(policy)
        assert policy.state == climb


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": -0.1}, {"threshold": 2}, {"add": 0}, {"settle": 4}, {"retry": -1}, {"wait_s": float("nan")}],
)
def test_wrong_options(wrong):
    with pytest.raises(UserError, match="provisioning cannot work with this"):
        Provisioning(**wrong)
