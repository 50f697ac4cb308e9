"""Generated problems of mathematics and the exact checker of steps, against sympy's own reading of equations."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from sympy.parsing.sympy_parser import implicit_multiplication, parse_expr, standard_transformations

from capo_critique import split_steps
from envs import UserError
from mini import math_problems
from mini.math_problems import solution_of, wrong_steps

ROOT = Path(__file__).resolve().parent.parent
X = sympy.Symbol("x")


def oracle(equation):
    """The single solution by sympy, or None. Python's own grammar reads the sides, so division and products go from the left."""
    left, right = (parse_expr(side, transformations=(*standard_transformations, implicit_multiplication)) for side in equation.split("="))
    solutions = sympy.solveset(left - right, X, sympy.Rationals)
    if not (isinstance(solutions, sympy.FiniteSet) and len(solutions) == 1):
        return None
    (solution,) = solutions
    return Fraction(int(solution.p), int(solution.q))


numbers = st.integers(0, 60).map(str)
atoms = numbers | st.just("x") | st.integers(2, 9).map("{}x".format) | st.integers(-9, -1).map("({})".format)
sides = st.recursive(
    atoms,
    lambda inner: st.tuples(inner, st.sampled_from([" + ", " - "]), inner).map("".join)
    | st.tuples(st.integers(-9, 9), inner).map(lambda pair: f"({pair[0]}) * ({pair[1]})")
    | st.tuples(inner, st.integers(-9, 9).filter(bool)).map(lambda pair: f"({pair[0]}) / {pair[1]}"),
    max_leaves=4,
)


@given(sides, sides)
def test_an_equation_has_the_solution_that_sympy_finds(left, right):
    assert solution_of(f"{left} = {right}") == oracle(f"{left} = {right}")


@pytest.mark.parametrize(
    "equation, solution",
    [("3x = 14", Fraction(14, 3)), ("-x = 5", -5), ("x = \\boxed{-7}", -7), ("2(x + 3) = 10", 2),
     ("12 / 3 / 2 = x", 2), ("12 / -6 = x", -2),
     ("7 = x", 7), ("(x)(2) = 8", 4), ("12 / 4x = 9", 3), ("x - -3 = 5", 2), ("\n\n x = 4 \n\n", 4)],
)  # fmt: skip
def test_what_an_equation_may_look_like(equation, solution):
    assert solution_of(equation) == solution


@pytest.mark.parametrize(
    "text",
    ["", "   ", "x", "x = 2 = 2", "x = ", "= 5", "x = x", "2x = 2x + 1", "x * x = 4", "6 / x = 2", "x = 4 / 0", "x = (3", "x = 3)",
     "x = 3 4",
     "2(x + 3)4 = 40", "x = ٣", "x = 5.",
     "x = 2.5", "x = 2 + ", "x = * 2", "so x = 3", "x = ²", "y = 3", "x = \\boxed{\\boxed{3}}", "x = \\boxed{", "😀",
     "x = " + "(" * 5000 + "1" + ")" * 5000, "x = " + "-" * 5000 + "1",
     "x = " + "9" * 5000],
)  # fmt: skip
def test_what_is_no_equation_with_one_solution_has_none_and_raises_nothing(text):
    assert solution_of(text) is None


def test_the_worked_example():
    """A wrong line, and then the right answer out of nothing: both are wrong steps, the outcome alone would call it right."""
    assert wrong_steps("Solve for x: 3x + 4 = 19", "3x = 19 - 4\n\n3x = 14\n\nx = \\boxed{5}") == {2, 3}
    assert wrong_steps("Solve for x: 3x + 4 = 19", "3x = 19 - 4\n\n3x = 14\n\nx = 14 / 3") == {2}  # what follows from a wrong line is right
    assert wrong_steps("Solve for x: 3x + 4 = 19", "x = \\boxed{5}") == set()
    assert wrong_steps("Solve for x: 3x + 4 = 19", "") == {1}
    assert wrong_steps("Solve for x: 3x + 4 = 19", "well\n\nx = \\boxed{5}\n\nx = 5") == {1, 2}


@pytest.mark.parametrize("problem", ["What is 2 + 2?", "Solve for x: ", "Solve for x: x = x", "Solve for x: x + 1"])
def test_a_problem_of_other_kind_is_refused(problem):
    with pytest.raises(ValueError, match="cannot be checked exactly; use another judge"):
        wrong_steps(problem, "x = 1")


@pytest.mark.parametrize("difficulty", math_problems.LARGEST)
def test_worked_solutions_have_no_wrong_step_and_end_in_the_answer(difficulty):
    made = math_problems.make(train=300, test=60, difficulty=difficulty, seed=3)
    steps = []
    for problem in made["train"] + made["test"]:
        assert wrong_steps(problem["problem"], problem["solution"]) == set()
        assert problem["solution"].endswith(f"\\boxed{{{problem['answer']}}}") and problem["solution"].count("boxed") == 1
        assert oracle(problem["problem"].removeprefix("Solve for x: ")) == int(problem["answer"])
        steps.append(len(split_steps(problem["solution"])))
    assert min(steps) >= 2 and len(set(steps)) >= 2
    assert {"x = ", "("} <= {part for p in made["train"] for part in ("x = ", "(") if part in p["problem"]} or difficulty < 3


def test_harder_problems_take_more_steps():
    means = []
    for difficulty in math_problems.LARGEST:
        solutions = [p["solution"] for p in math_problems.make(train=200, test=1, difficulty=difficulty)["train"]]
        means.append(sum(len(split_steps(s)) for s in solutions) / len(solutions))
    assert means == sorted(set(means))


@given(st.integers(0, 10**6), st.sampled_from(list(math_problems.LARGEST)), st.data())
def test_one_number_changed_makes_its_step_wrong_and_no_earlier_one(seed, difficulty, data):
    """Sympy decides, line by line, which steps the change makes wrong: that one, and the next where the change does not follow it."""
    (problem,) = math_problems.make(train=1, test=1, difficulty=difficulty, seed=seed)["train"]
    solution = problem["solution"]
    place = data.draw(st.sampled_from(list(re.finditer(r"\d+", solution))))
    changed = solution[: place.start()] + str(int(place[0]) + data.draw(st.integers(1, 9))) + solution[place.end() :]
    lines = [problem["problem"].removeprefix("Solve for x: "), *re.sub(r"\\boxed{(.*)}", r"\1", changed).split("\n\n")]
    solutions = [oracle(line) for line in lines]
    expected = {k for k in range(1, len(lines)) if solutions[k] is None or solutions[k] != solutions[k - 1]}
    step = 1 + next(k for k, (start, end) in enumerate(split_steps(solution)) if start <= place.start() < end)
    assert wrong_steps(problem["problem"], changed) == expected
    assert expected <= {step, step + 1}


def test_no_problem_is_both_for_training_and_for_tests_whatever_the_seeds():
    """Without it a file of another seed could train on the first one's test problems."""
    made = [math_problems.make(train=400, test=100, difficulty=1, seed=seed) for seed in (0, 1, 2)]
    train, test = ({p["problem"] for m in made for p in m[split]} for split in ("train", "test"))
    assert not train & test
    assert [len({p["problem"] for p in m["train"]}) for m in made] == [400] * 3
    assert made[0] != made[1] and made[0] == math_problems.make(train=400, test=100, difficulty=1, seed=0)


@pytest.mark.parametrize(
    "asked, says",
    [(dict(difficulty=5), "difficulty 5: give one of 1, 2, 3, 4."),
     (dict(train=0), "0 training and 10 test problems: give at least 1 of each."),
     (dict(difficulty=1, test=3000), "difficulty 1 gave only")],
)  # fmt: skip
def test_bad_input_is_one_sentence(asked, says):
    with pytest.raises(UserError, match=re.escape(says)):
        math_problems.make(**dict(train=10, test=10) | asked)


def test_the_command_writes_files_and_ends_on_bad_input_with_a_sentence(tmp_path):
    def command(*args):
        return subprocess.run([sys.executable, "-m", "mini.math_problems", *args], cwd=ROOT, capture_output=True, text=True)

    done = command("--out", str(tmp_path / "data"), "--train", "20", "--test", "10", "--seed", "4")
    assert done.returncode == 0 and "Solve for x: " in done.stdout and "\\boxed{" in done.stdout
    for split, size in (("train", 20), ("test", 10)):
        lines = [json.loads(line) for line in (tmp_path / "data" / f"{split}.jsonl").read_text().splitlines()]
        assert lines == math_problems.make(train=20, test=10, seed=4)[split] and len(lines) == size
    assert {f.name for f in (tmp_path / "data").iterdir()} == {"train.jsonl", "test.jsonl"}
    (tmp_path / "file").write_text("")
    for args, says in ((["--difficulty", "9"], "difficulty 9"), (["--out", str(tmp_path / "file" / "below")], "give another --out")):
        done = command("--train", "2", "--test", "2", *args)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
