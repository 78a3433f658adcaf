import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.plan.batch_size import LR_RULES, scaled_lr


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("sqrt", 0.2), ("linear", 0.4)])
def test_four_times_the_batch(rule, lr):
    assert scaled_lr(0.1, 1024, 256, rule) == pytest.approx(lr)


@given(
    st.sampled_from(sorted(LR_RULES)),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(1, 4096),
)
def test_rules_compose_and_keep_the_base(rule, base, middle, batch):
    assert scaled_lr(0.1, base, base, rule) == pytest.approx(0.1)
    by_way = scaled_lr(scaled_lr(0.1, middle, base, rule), batch, middle, rule)
    assert by_way == pytest.approx(scaled_lr(0.1, batch, base, rule))


def test_unknown_rule_names_the_known_ones():
    with pytest.raises(UserError, match=r"cubic.*none, sqrt, linear"):
        scaled_lr(0.1, 2, 1, "cubic")


@pytest.mark.parametrize(("batch", "base"), [(0, 1), (1, 0), (-8, 8)])
def test_empty_batches_are_refused(batch, base):
    with pytest.raises(UserError, match="at least one sample"):
        scaled_lr(0.1, batch, base, "linear")
