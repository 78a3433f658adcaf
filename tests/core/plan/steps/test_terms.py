"""The physical form of a step's time: limits in which it is known."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from elastune.core.plan.step_time import CONSTANTS, Floats, StepSplits, StepWork, parts, seconds, transformer

NAMES = list(CONSTANTS)


def constants(**some: float) -> Floats:
    return np.array([some.get(name, 1e-30) for name in NAMES])


def splits(batch: int = 8, micro: int = 1, per_node: int = 8, **axes: int) -> StepSplits:
    sizes = {axis: axes.get(axis, 1) for axis in ("data", "shard", "tensor", "pipeline")}
    results = (batch, micro, *sizes.values(), per_node)
    return StepSplits(*(np.array([number], float) for number in results))


def work(**some: float) -> StepWork:
    plain = {
        "blocks": 4.0,
        "block_flops": 1.0,
        "split_bytes": 1.0,
        "boundary_bytes": 1.0,
        "block_bytes": 10.0,
        "edge_flops": 0.0,
        "edge_bytes": 0.0,
    }
    return StepWork(**{name: np.float64(value) for name, value in {**plain, **some}.items()})


def one(c: Floats, plan: StepSplits, of: StepWork | None = None) -> float:
    return float(seconds(c, of or work(), plan)[0])


def test_a_pipeline_idles_by_one_pass_for_every_further_stage() -> None:
    c = constants(flop_s=1.0)
    assert one(c, splits()) == pytest.approx(8 * 4)
    assert one(c, splits(pipeline=4)) == pytest.approx((8 + 4 - 1) * 1)  # passes + stages - 1, each of one block


def test_the_fullest_stage_holds_up_every_pass_and_the_others_one() -> None:
    """Three stages of 4 blocks, the fullest with half of their arithmetic; six are taken to be as uneven."""
    c, of = constants(flop_s=1.0), replace(work(), fullest=(1.0, 0.6, 0.5))
    for stages, most in ((1, 4.0), (2, 2.4), (3, 2.0), (6, 1.0)):
        assert one(c, splits(pipeline=stages), of) == pytest.approx(8 * most + (4 - most))


def test_the_edge_holds_up_every_pass_but_is_in_no_other_stage() -> None:
    assert one(constants(flop_s=1.0, edge_flop_s=1.0), splits(pipeline=2), work(edge_flops=3.0)) == pytest.approx(
        (8 + 1) * 2 + 8 * 3
    )


def test_tensor_divides_arithmetic_and_adds_four_ring_sums_a_block() -> None:
    assert one(constants(flop_s=1.0), splits(tensor=4)) == pytest.approx(8 * 4 / 4)
    result = parts(constants(tensor_byte_s=1.0), work(), splits(tensor=4))
    assert result["tensor"][0] == pytest.approx(
        8 * 4 * 4 * (2 * 3 / 4)
    )  # passes, blocks, sums, a ring's share of 1 byte


def test_what_tensor_leaves_whole_every_worker_does() -> None:
    assert one(constants(flop_s=1.0), splits(tensor=4), work(whole_flops=0.6)) == pytest.approx(8 * 4 * (0.4 / 4 + 0.6))


def test_sums_along_tensor_are_as_many_and_as_large_as_the_program_has() -> None:
    of = work(tensor_sums=0.5, summed_bytes=3.0)
    assert parts(constants(tensor_byte_s=1.0), of, splits(tensor=4))["tensor"][0] == pytest.approx(
        8 * 4 * 3 * 2 * 3 / 4
    )
    assert parts(constants(tensor_sum_s=1.0), of, splits(tensor=4))["tensor"][0] == pytest.approx(8 * 4 * 0.5 * 2 * 3)


def test_a_sum_along_tensor_is_begun_once_however_many_take_part() -> None:
    c = constants(tensor_begin_s=1.0)
    for ways in (2, 4):
        assert parts(c, work(), splits(tensor=ways))["tensor"][0] == pytest.approx(8 * 4 * 4)  # passes, blocks, sums
    assert parts(c, work(), splits())["tensor"][0] == 0


def test_what_is_launched_takes_no_less_however_little_it_computes() -> None:
    c = constants(flop_s=1e-6, launch_s=2.0)
    assert one(c, splits(tensor=4)) == pytest.approx(one(c, splits())) == pytest.approx(8 * 4 * 2)


def test_gradients_are_summed_within_nodes_and_then_among_them() -> None:
    near = parts(constants(gradient_byte_s=1.0), work(), splits(data=8))["gradients"][0]
    assert near == pytest.approx(2 * 7 / 8 * 40)
    c = constants(gradient_byte_s=1.0, across_byte_s=100.0)
    far = parts(c, work(), splits(data=8, per_node=4))["gradients"][0]
    assert far == pytest.approx(2 * 3 / 4 * 40 + 100 * 2 * 1 / 2 * 40)


def test_what_is_begun_between_nodes_takes_what_it_takes_within_one_and_the_latency() -> None:
    """A hop of 1 s within a node, and 10 s more between them."""
    hop = constants(gradient_hop_s=1.0, across_hop_s=10.0)
    assert parts(hop, work(), splits(data=8, per_node=4))["gradients"][0] == pytest.approx(2 * 3 * 1 + 2 * 1 * 11)
    sums = parts(constants(tensor_sum_s=1.0, across_hop_s=10.0), work(), splits(tensor=4, per_node=2))["tensor"][0]
    assert sums == pytest.approx(8 * 4 * 4 * 6 * 11)  # passes, blocks, sums, hops
    sends = parts(constants(send_s=1.0, across_hop_s=10.0), work(), splits(pipeline=4, per_node=2))["pipeline"][0]
    assert sends == pytest.approx((8 + 4 - 2) * 2 * 11)


def test_plans_that_divide_parameters_gather_each_part_in_every_pass() -> None:
    c = constants(gradient_hop_s=1.0, gradient_byte_s=1.0)
    both = StepSplits(*(np.array([each, each], float) for each in (8, 2, 1, 2, 1, 1, 8)))
    result = parts(c, work(gathered=5.0), both, np.array([False, True]))["gradients"]
    assert result == pytest.approx([2 * (1 + 40 / 2), 2 * 3 * (5 + 40 / 2)])  # passes, half sums; parts and bytes


def test_workers_of_a_node_share_the_link_to_the_next() -> None:
    """Two nodes of two tensor parallel workers: each sums its half with its like, both over one link."""
    c = constants(across_byte_s=1.0)
    assert one(c, splits(data=4, per_node=4)) == pytest.approx(0.0, abs=1e-20)
    both = parts(c, work(), splits(data=2, tensor=2, per_node=2))["gradients"][0]
    assert both == pytest.approx(2 * (1 / 2) * 20 * 2)


@pytest.mark.parametrize(
    ("axes", "columns"), [({"shard": 8}, 1), ({"data": 2, "shard": 4}, 1), ({"data": 4, "tensor": 2}, 2)]
)
def test_where_state_is_divided_everybody_sends_to_everybody(axes: dict[str, int], columns: int) -> None:
    """Of 40 bytes, there and back: each worker of a node sends its share of them to each elsewhere, over one link."""
    size, around = 40 / columns, 8 // columns
    here = 4 // columns
    sent = columns * here * (around - here) * size / around
    result = parts(constants(across_byte_s=1.0), work(), splits(per_node=4, **axes))["gradients"][0]
    assert result == pytest.approx(2 * sent)


def test_stages_send_as_many_copies_over_a_link_as_tensor_has_workers_there() -> None:
    c = constants(across_byte_s=1.0)
    for tensor, copies in ((1, 1), (2, 2), (4, 2)):
        result = parts(c, work(tensor_sums=0.0), splits(tensor=tensor, pipeline=4, per_node=2))["pipeline"][0]
        assert result == pytest.approx((8 + 4 - 2) * 2 * copies)


def test_what_tensor_leaves_whole_every_worker_sums() -> None:
    result = parts(constants(gradient_byte_s=1.0, update_byte_s=1.0), work(whole_bytes=4.0), splits(data=2, tensor=4))
    assert result["gradients"][0] == result["update"][0] == pytest.approx(4 * (6 / 4 + 4))


def test_neighbours_that_a_nodes_edge_cuts_through_meet_between_nodes() -> None:
    """Three along tensor: of the third ones of eight to a node one stands on the next."""
    c = constants(tensor_sum_s=1.0, across_hop_s=10.0)
    for data, hop in ((1, 1), (2, 1), (8, 11)):
        result = parts(c, work(), splits(tensor=3, data=data))["tensor"][0]
        assert result == pytest.approx(np.ceil(8 / data) * 4 * 4 * 4 * hop)  # passes, blocks, sums, hops
    assert splits(tensor=3, data=8).nodes == 3, "not four nodes with two trios each"


def test_sums_along_tensor_go_from_each_to_each_over_one_link_a_node() -> None:
    c = constants(across_byte_s=1.0)
    result = parts(c, work(), splits(tensor=8, per_node=2))["tensor"][0]
    assert result == pytest.approx(
        8 * 4 * 4 * 2 * 2 * 6 / 8
    )  # passes, blocks, sums; two workers, to six of eight, twice


def test_one_worker_sums_and_sends_nothing() -> None:
    result = parts(np.ones(len(NAMES)), work(), splits())
    assert result["gradients"][0] == result["tensor"][0] == result["pipeline"][0] == 0


def test_a_hundred_thousand_plans_are_one_call_with_the_same_numbers_as_each_alone() -> None:
    rng = np.random.default_rng(0)
    draw = [2.0 ** rng.integers(0, 4, 100_000) for _ in range(6)]
    many = StepSplits(draw[0] * 64, *draw[1:], np.full(100_000, 8.0))
    c = np.exp(rng.normal(size=len(NAMES)))
    begun = time.process_time()
    together = seconds(c, work(edge_flops=2.0, edge_bytes=3.0), many)
    assert time.process_time() - begun < 1, "the goal, of one core"
    for i in (0, 17, 99_999):
        alone = seconds(c, work(edge_flops=2.0, edge_bytes=3.0), many.take(slice(i, i + 1)))
        assert together[i] == pytest.approx(float(alone[0]))


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_what_is_no_plan_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        splits(data=bad)  # type: ignore[arg-type]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="block_flops"):
        work(block_flops=float("nan"))


def test_a_gpt_has_the_arithmetic_of_megatron_s_formula() -> None:
    """Narayanan et al. 2021, equation 3, without recomputation: 72 B s l h^2 (1 + s/6h + V/12lh)."""
    h, layers, s, vocabulary = 1024.0, 24.0, 1024.0, 51_200.0
    of = transformer(np.float64(h), np.float64(layers), np.float64(16), np.float64(s), vocabulary)
    published = 72 * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert float(of.blocks * of.block_flops + of.edge_flops) == pytest.approx(published)
