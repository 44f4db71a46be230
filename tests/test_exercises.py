"""The mechanism of the exercises: right, not yet, and what is wrong said precisely."""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import pytest
import torch

from kvlab import exercises
from kvlab.exercises import ExerciseError, checker, close, integer, near, number, same_function, whole


@pytest.fixture
def demo(monkeypatch):
    """A chapter 98 with three exercises: a number, a function, a tensor."""
    monkeypatch.setattr(exercises, "_CHECKERS", {})

    @checker("98.1")
    def _(answer):
        near(answer, 42.0, 0.01)

    @checker("98.2")
    def _(function):
        rng = random.Random(exercises.SEED)
        cases = [(rng.randint(0, 99), rng.randint(1, 9)) for _ in range(30)]
        same_function(function, lambda tokens, page: -(-tokens // page), cases)

    @checker("98.10")
    def _(answer):
        close(answer, torch.arange(6.0).reshape(2, 3))


def test_an_answer_is_judged_alike_every_time(demo):
    @checker("98.3")
    def _(function):
        function(random.Random(exercises.SEED).random(), torch.rand(()).item())

    drawn = []
    for _ in range(2):
        torch.rand(3)  # what the reader drew before does not matter
        exercises.check("98.3", lambda *numbers: drawn.append(numbers))
    assert drawn[0] == drawn[1]
    before = torch.random.get_rng_state()
    exercises.check("98.3", lambda *numbers: None)
    assert torch.equal(torch.random.get_rng_state(), before), "the reader's own random numbers went on"


def test_right_and_not_yet(demo, capsys):
    exercises.check("98.1", 42.1)
    exercises.check("98.1", ...)
    exercises.check("98.2", lambda tokens, page: math.ceil(tokens / page))
    exercises.check("98.2", lambda tokens, page: ...)
    exercises.check("98.10", torch.arange(6.0).reshape(2, 3))
    exercises.check("98.1", (1, ...))
    assert capsys.readouterr().out.splitlines() == [
        "98.1: right", "98.1: not yet", "98.2: right", "98.2: not yet", "98.10: right", "98.1: not yet",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (84, "too large by a factor of 2"),
        (41.0, "too small by 2.4"),
        (-42, "sign"),
        (0, "is 0"),
        (True, "boolean"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("42", "type str"),
        (None, "NoneType"),
        ([42], "type list"),
        (torch.tensor([42.0, 42.0]), "2 elements"),
        (torch.tensor(True), "boolean"),
        (42 + 0j, "complex"),
    ],
)
def test_a_wrong_number_is_told_what_is_wrong(demo, answer, says):
    with pytest.raises(ExerciseError, match=r"^98\.1: ") as error:
        exercises.check("98.1", answer)
    assert says in str(error.value)


def test_numbers_may_be_tensors_or_arrays_of_one_element(demo):
    assert exercises.outcome("98.1", torch.tensor([42.0])) == "right"
    assert exercises.outcome("98.1", torch.tensor(42.0).numpy()) == "right"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (torch.zeros(3, 2), r"shape \[3, 2\]"),
        (torch.full((2, 3), float("nan")), "NaN at"),
        (torch.arange(6.0).reshape(2, 3) + torch.tensor([0, 0, 1.0]), r"off by 1 at \[0, 2\]"),
        ([[0, 1, 2], [3, 4, 5]], "type list"),
        (torch.ones(2, 3, dtype=torch.bool), "booleans"),
        (torch.full((2, 3), float("inf")), "inf"),
        (torch.arange(6.0).reshape(2, 3) + 5j, "complex64"),
    ],
)
def test_a_wrong_tensor_is_told_what_is_wrong(demo, answer, says):
    with pytest.raises(ExerciseError, match=says):
        exercises.check("98.10", answer)


def test_what_a_function_raises_is_named_with_its_arguments(demo):
    def pages(tokens, page):
        return tokens.missing

    with pytest.raises(ExerciseError, match=r"98\.2: pages\(\d+, \d\) raised AttributeError: .*missing") as error:
        exercises.check("98.2", pages)
    assert isinstance(error.value.__cause__, AttributeError)
    with pytest.raises(ExerciseError, match="raised TypeError"):
        exercises.check("98.2", lambda: 3)
    with pytest.raises(ExerciseError, match="could not be used: TypeError"):
        exercises.check("98.2", 3)
    with pytest.raises(ExerciseError, match="raised ZeroDivisionError"):
        exercises.check("98.2", functools.partial(lambda zero, tokens, page: tokens / zero, 0))


def test_a_function_cannot_spoil_the_hidden_inputs():
    def clears(items):
        items.clear()
        return 3

    same_function(clears, len, [([1, 2, 3],), ([4, 5, 6],)])
    with pytest.raises(ExerciseError, match=r"clears\(\[1\]\) is 3: too large"):
        same_function(clears, len, [([1],)])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, True),
        (0, False),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        ("b", "a"),
        (0, None),
        ([1], 1),
        (np.False_, True),
        (np.int64(1), True),
        (1, np.True_),
    ],
)
def test_results_of_another_kind_are_refused(result, expected):
    with pytest.raises(ExerciseError):
        same_function(lambda: result, lambda: expected, [()])


def test_whole_number_and_number():
    for right in (3, np.int64(3), np.uint8(3), np.array([3]), torch.tensor(3)):
        whole(right, 3)
        assert type(integer(right)) is int
    for wrong in (3.0, 3.5, 4, True, math.nan, np.float64(3), torch.tensor(3.0), np.True_, None):
        with pytest.raises(ExerciseError):
            whole(wrong, 3)
    assert number(torch.tensor(3)) == 3
    near(1e-12, 0.0)
    with pytest.raises(ExerciseError, match="must be 0"):
        near(1e-3, 0.0)


@pytest.mark.parametrize("rel", [-1, math.nan, math.inf])
def test_a_tolerance_that_lets_all_through_is_refused(rel):
    with pytest.raises(ValueError, match="rel"):
        near(1, 2, rel)
    with pytest.raises(ValueError, match="rel"):
        close(torch.ones(1), torch.zeros(1), rel=rel)
    with pytest.raises(ValueError, match="rel"):
        same_function(lambda: 1, lambda: 2, [()], rel=rel)


@pytest.mark.parametrize("expected", [math.nan, math.inf, -math.inf])
def test_an_expected_number_that_meets_anything_is_refused(expected):
    with pytest.raises(ValueError, match="expected"):
        near(5, expected)


@pytest.mark.parametrize("expected", [torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2j])])
def test_an_expected_tensor_of_nan_or_complex_numbers_is_refused(expected):
    with pytest.raises(ValueError, match="expected holds"):
        close(torch.tensor([1.0, 2.0]), expected)


def test_a_function_tried_on_nothing_is_refused():
    with pytest.raises(ValueError, match="inputs"):
        same_function(lambda x: 1, lambda x: 2, iter([]))


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.True_, True), (np.False_, False), (True, np.True_), (torch.tensor(True), True), (np.str_("a"), "a"),
        (np.int64(3), 3), (3, np.int64(3)), (np.float32(0.5), 0.5), (0.5, np.float32(0.5)), ([np.True_, 1], [True, 1]),
    ],
)  # fmt: skip
def test_numpys_scalars_are_as_good_as_pythons(result, expected):
    same_function(lambda: result, lambda: expected, [()])


class Stub:
    """A callable object with a name of its own and a grid, as a kernel has."""

    def __init__(self, result):
        self.result = result

    def __call__(self, *args):
        return self.result(*args)

    def __getitem__(self, grid):
        return self.result


def test_a_callable_object_is_a_function_too(demo):
    assert exercises.outcome("98.2", Stub(lambda tokens, page: ...)) == "not yet"
    assert exercises.outcome("98.2", functools.partial(lambda z, tokens, page: ..., 0)) == "not yet"
    assert exercises.outcome("98.2", Stub(lambda tokens, page: -(-tokens // page))) == "right"
    with pytest.raises(ExerciseError, match=r"98\.2: the function\(\d+, \d\) raised ZeroDivisionError"):
        exercises.check("98.2", Stub(lambda tokens, page: tokens / 0))
    guarded = exercises._guarded(Stub(abs))
    assert (guarded.result, guarded[1,], guarded(-2)) == (abs, abs, 2)


def test_unknown_exercises_are_value_errors_that_list_what_there_is(demo):
    with pytest.raises(ValueError, match=r"98\.1, 98\.2, 98\.10"):
        exercises.check("98.3", 1)
    with pytest.raises(ValueError, match="no exercises"):
        exercises.check("97.1", 1)
    with pytest.raises(ValueError, match="no exercises"):
        exercises.check("../98.1", 1)
    with pytest.raises(ValueError, match="must be a string"):
        exercises.check(98.1, 1)
    with pytest.raises(ValueError, match="chapter is 98"):
        exercises.exercises(98)


def test_an_exercise_has_one_checker_and_a_proper_id(demo):
    with pytest.raises(ValueError, match="already"):

        @checker("98.1")
        def another(answer): ...

    for bad in ("98", "98.x", "x.1", "", "98.\u00b2", "9\u00b2.1", "98.1 ", "98.1\n", 98.1):
        with pytest.raises(ValueError, match="must be a chapter"):
            checker(bad)


def test_assert_refuses(demo):
    exercises.assert_refuses("98.1", [41, 43.0, "42"])
    with pytest.raises(AssertionError, match="'right' to wrong answer 1"):
        exercises.assert_refuses("98.1", [41, 42.0])
    with pytest.raises(AssertionError, match="'not yet' to wrong answer 0"):
        exercises.assert_refuses("98.1", [..., 41])
    with pytest.raises(ValueError, match="at least two"):
        exercises.assert_refuses("98.1", [41])


def test_checkers_are_loaded_with_the_first_question():
    assert exercises.exercises("00")[0] == "00.1"
    assert exercises.outcome("00.1", ...) == "not yet"
