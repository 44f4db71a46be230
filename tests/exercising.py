"""What the exercises of every chapter are held to: a test file's class inherits it, with its answers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from kvlab import exercises, runtime
from kvlab.exercises import ExerciseError

NOT_ANSWERS = [None, 3, "text", [1, 2], {"a": 1}, list, float("nan"), torch.zeros(2), lambda: None]


class Answers:
    """Right answers pass, wrong ones are refused, what is no answer is refused, and a stub is no error."""

    RIGHT: ClassVar[dict[str, list[Any]]] = {}
    WRONG: ClassVar[dict[str, list[Any]]] = {}
    KERNEL: ClassVar[str] = ""  # the exercise whose answers are kernels, that must be launched
    UNTRACED: ClassVar[int] = -1  # its wrong answer that leaves no trace on a GPU: what it reads is not used

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "number" in metafunc.fixturenames:
            pairs = [(name, i) for name, wrong in self.WRONG.items() for i in range(len(wrong))]
            metafunc.parametrize(("name", "number"), pairs)
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.RIGHT))

    def needs(self, name: str) -> None:
        if name == self.KERNEL and not runtime.can_launch():
            pytest.skip("no kernel can be launched here")

    def test_right_answers_pass(self, name: str) -> None:
        self.needs(name)
        assert len(self.RIGHT[name]) >= 2
        for answer in self.RIGHT[name]:
            for _ in range(3):  # the checks draw anew each time
                assert exercises.outcome(name, answer) == "right"

    def test_wrong_answers_are_refused(self, name: str, number: int) -> None:
        self.needs(name)
        if (name, number) == (self.KERNEL, self.UNTRACED) and runtime.HAS_GPU:
            pytest.skip("a stray read whose value is not used leaves no trace on a GPU")
        for _ in range(3):
            with pytest.raises(ExerciseError):
                exercises.check(name, self.WRONG[name][number])

    def test_what_is_no_answer_at_all_is_refused(self, name: str) -> None:
        self.needs(name)
        exercises.assert_refuses(name, NOT_ANSWERS)

    def test_the_stub_of_every_exercise_is_no_error(self, name: str) -> None:
        assert exercises.outcome(name, ...) == "not yet"
