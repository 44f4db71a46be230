"""The simulator: units are shared, work is kept in order, tokens are not lost, and a deadlock is named."""

from __future__ import annotations

import itertools
import random

import pytest

from kvlab.simulator import pieces, queue, simulate


def test_one_program_does_one_thing_after_another():
    steps = [("start", "a", 3, "x"), ("start", "b", 2, "y"), ("start", "a", 1, "z"), ("wait", "a", 0)]
    spans, end = simulate({"p": iter(steps)})
    assert spans == {("p", "a"): [(0, 3, "x"), (3, 4, "z")], ("p", "b"): [(0, 2, "y")]}
    assert end == 4


def test_a_wait_may_leave_work_in_flight():
    steps = [("start", "a", 3, "x"), ("wait", "a", 1), ("start", "b", 1, "y"), ("wait", "a", 0), ("start", "b", 1, "z")]
    assert simulate({"p": iter(steps)})[0]["p", "b"] == [(0, 1, "y"), (3, 4, "z")]


def test_a_unit_is_shared_equally():
    spans, end = simulate({"p": iter([("start", "u", 1, "x")]), "q": iter([("start", "u", 3, "y")])})
    assert spans == {("p", "u"): [(0, 2, "x")], ("q", "u"): [(0, 4, "y")]}
    assert end == 4


def test_no_time_is_lost_or_won():
    rng = random.Random(0)
    for _ in range(20):
        work = {name: [rng.uniform(0.1, 5) for _ in range(6)] for name in "pqr"}
        spans, end = simulate({n: iter([("start", "u", w, "") for w in each]) for n, each in work.items()})
        assert end == pytest.approx(sum(map(sum, work.values())))  # somebody is always there
        assert all(len(spans[n, "u"]) == 6 for n in work)


def test_tokens_pass_from_one_to_another():
    give = iter([("start", "u", 2, "x"), ("wait", "u", 0), ("give", "t", 2)])
    take = iter([("take", "t", 1), ("start", "v", 1, "y"), ("take", "t", 1), ("start", "v", 1, "z")])
    assert simulate({"q": take, "p": give})[0]["q", "v"] == [(2, 3, "y"), (3, 4, "z")]


def test_who_waits_for_ever_is_named():
    with pytest.raises(RuntimeError, match=r"deadlock after 2 cycles: \{'p': \('take', 't', 1\)\}"):
        simulate({"p": iter([("start", "u", 2, "x"), ("wait", "u", 0), ("take", "t", 1)]), "q": iter([])})
    with pytest.raises(ValueError, match="p yields"):
        simulate({"p": iter([("sleep", "u", 2)])})
    assert simulate({}) == ({}, 0.0)


def test_a_free_place_takes_the_next_program():
    lanes, end = queue([(3, "a"), (1, "b"), (1, "c"), (2, "d")], 2)
    assert lanes == [[(0, 3, "a")], [(0, 1, "b"), (1, 2, "c"), (2, 4, "d")]]
    assert end == 4
    assert queue([], 3) == ([[], [], []], 0.0)
    rng = random.Random(0)
    for _ in range(50):
        work = [(rng.random(), str(i)) for i in range(rng.randint(0, 40))]
        places = rng.randint(1, 9)
        lanes, end = queue(work, places)
        total, longest = sum(t for t, _ in work), max((t for t, _ in work), default=0.0)
        assert total / places - 1e-9 <= end <= total / places + longest + 1e-9
        assert sorted(label for lane in lanes for *_, label in lane) == sorted(label for _, label in work)
        assert all(a[1] <= b[0] for lane in lanes for a, b in itertools.pairwise(lane))


def test_a_queue_refuses_what_is_no_grid():
    with pytest.raises(ValueError, match="places is 0"):
        queue([(1, "a")], 0)
    with pytest.raises(ValueError, match=r"work holds 'a' of time -1"):
        queue([(-1, "a")], 1)


def test_a_line_is_cut_where_shares_end_and_where_items_do():
    assert pieces({"a": 5, "none": 0, "b": 2}, 3) == [(0, 3, "a"), (3, 5, "a"), (5, 6, "b"), (6, 7, "b")]
    assert pieces({"a": 4}, 9) == [(0, 4, "a")]
    assert pieces({}, 2) == []


@pytest.mark.parametrize(("blocks", "size"), [({"a": 1}, 0), ({"a": -1, "b": 2}, 1)])
def test_a_line_refuses_what_is_no_share(blocks, size):
    with pytest.raises(ValueError, match=f"^size is {size} and blocks "):
        pieces(blocks, size)
