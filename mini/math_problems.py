"""Makes problems of mathematics with worked solutions, and says exactly which steps of an answer are wrong: no download, no judge.

    python -m mini.math_problems --out data/math_mini                     # 8,000 training and 400 test problems
    python -m mini.math_problems --out data/hard --difficulty 4 --show 3

Every problem is one equation in x with a whole number for its solution; every step of an answer is an equation too, and steps are
separated by blank lines. So one question decides about every step: does it have the solution of the line before it?

    Solve for x: 3x + 4 = 19            x = 6 + 2 * 7 - 3 is a problem as well: arithmetic, one operation a step

    3x = 19 - 4                         right: both have the solution 5

    3x = 14                             wrong: 14/3 is not the solution of the line before

    x = \\boxed{5}                       wrong again, though the answer is right: it does not follow from the line before

Difficulty 1 to 4 sets the kinds of equation, the number of operations and the size of the numbers. A problem's own text decides
whether it is a training or a test problem, so that none is both, whatever the seeds and the numbers asked for.
"""

import argparse
import json
import os
import random
import re
import tempfile
import zlib
from fractions import Fraction
from pathlib import Path

from capo_critique import split_steps
from envs import UserError, run_script

DEFAULT_DATA = Path(__file__).resolve().parent.parent / "data" / "math_mini"
LARGEST = {1: 9, 2: 12, 3: 20, 4: 50}  # numbers of a problem, by difficulty
TEST_SHARE = 5  # one problem in so many is a test problem
QUESTION = "Solve for x: "

# -------------------------------------------------------------------------------------------------------- the checker


def parse_side(text):
    """A side of an equation as (a, b) for a x + b, exact. ValueError where it is no expression linear in x."""
    tokens, at = re.findall(r"\d+|[x+*/()-]|\S", text), 0

    def peek():
        return tokens[at] if at < len(tokens) else ""

    def take():
        nonlocal at
        at += 1
        return tokens[at - 1]

    def total():
        value = product()
        while peek() in ("+", "-"):
            sign = 1 if take() == "+" else -1
            value = tuple(v + sign * w for v, w in zip(value, product(), strict=True))
        return value

    def product():
        a, b = signed()
        while peek() and peek() in "*/x(":  # 3x and 3(x + 1) are products too
            divide = peek() == "/"
            if peek() in "*/":
                take()
                c, d = signed()
            else:
                c, d = atom()
            if divide and (c or not d):
                raise ValueError("divides by x or by 0")
            if a and c:
                raise ValueError("not linear in x")
            a, b = (a / d, b / d) if divide else (a * d + b * c, b * d)
        return a, b

    def signed():
        if peek() == "-":
            take()
            return tuple(-v for v in signed())
        return atom()

    def atom():
        token = take() if peek() else ""
        if re.fullmatch(r"[0-9]+", token):
            return Fraction(0), Fraction(int(token))
        if token == "x":
            return Fraction(1), Fraction(0)
        if token != "(":
            raise ValueError(f"{token!r} where a number, x or a bracket belongs")
        value = total()
        if not peek() or take() != ")":
            raise ValueError("a bracket that does not close")
        return value

    value = total()
    if peek():
        raise ValueError(f"{peek()!r} is left over")
    return value


def solution_of(equation):
    """The x of a linear equation, an exact Fraction; None for what is no equation, has no solution or more than one."""
    sides = re.sub(r"\\boxed\{([^{}]*)\}", r"(\1)", equation).split("=")
    try:
        (a, b), (c, d) = (parse_side(side) for side in sides)
        return (d - b) / (a - c) if a != c else None
    except (ValueError, RecursionError):  # also: not two sides
        return None


def wrong_steps(problem, response):
    """Numbers, from 1, of the steps of `response` that do not follow from the line before them; exact.

    problem: text made by this file, a ValueError for any other. A step that is no equation in x alone is wrong, and so is
    the one after it.
    """
    if not problem.startswith(QUESTION) or solution_of(problem.removeprefix(QUESTION)) is None:
        raise ValueError(f"{problem[:80]!r} is no problem of mini.math_problems: its steps cannot be checked exactly; use another judge.")
    lines = [problem.removeprefix(QUESTION), *(response[start:end] for start, end in split_steps(response))]
    solutions = [solution_of(line) for line in lines]
    return {step for step in range(1, len(lines)) if solutions[step] is None or solutions[step] != solutions[step - 1]}


# -------------------------------------------------------------------------------------------------------- the problems


def joined(terms):
    """Terms with their signs: ["3x", "-4"] is 3x - 4."""
    return terms[0] + "".join(f" - {t[1:]}" if t.startswith("-") else f" + {t}" for t in terms[1:])


def times_x(a):
    return {1: "x", -1: "-x"}.get(a, f"{a}x")


def arithmetic(rng, operations, largest):
    """x = a sum of numbers and products: lines in order, the products worked out first, then the sum from the left."""
    terms, left = [], operations + 1  # numbers still to be placed
    while left:
        factors = 2 if left > 1 and (left == 2 and not terms or rng.random() < 0.4) else 1
        numbers = " * ".join(str(rng.randint(2, largest)) for _ in range(factors))
        terms.append(numbers if not terms or rng.random() < 0.5 else "-" + numbers)
        left -= factors
    lines = [f"x = {joined(terms)}"]
    while len(terms) > 1 or "*" in terms[0]:
        place = next((k for k, term in enumerate(terms) if "*" in term), None)
        if place is not None:
            a, b = terms[place].split(" * ")
            terms = [*terms[:place], str(int(a) * int(b)), *terms[place + 1 :]]
        else:
            terms = [str(int(terms[0]) + int(terms[1])), *terms[2:]]
        lines.append(f"x = {joined(terms)}")
    return lines


def equation(rng, difficulty, largest):
    """a x + b = c x + d, with c = 0 at difficulty 1 and a bracket from difficulty 3 on: lines in order."""
    x, a = rng.randint(-largest, largest), rng.randint(2, 9)
    c = 0 if difficulty == 1 else rng.choice([k for k in range(-9, 10) if k not in (0, a)])
    b, lines = rng.choice([k for k in range(-largest, largest + 1) if k]), []
    if difficulty >= 3:
        inner = b
        b = a * inner
        lines.append((f"{a}({joined(['x', str(inner)])})", c, (a - c) * x + b))
    lines.append((joined([times_x(a), str(b)]), c, (a - c) * x + b))
    texts = [f"{left} = {joined([times_x(c), str(d)]) if c else d}" for left, c, d in lines]
    d = (a - c) * x + b
    if c:
        texts.append(f"{joined([times_x(a), times_x(-c)])} = {joined([str(d), str(-b)])}")
        texts.append(f"{times_x(a - c)} = {joined([str(d), str(-b)])}")
    else:
        texts.append(f"{times_x(a)} = {joined([str(d), str(-b)])}")
    if a - c != 1:
        texts += [f"{times_x(a - c)} = {d - b}", f"x = {d - b} / {a - c}"]
    return [*texts, f"x = {x}"]


def draw(rng, difficulty):
    """A problem of this difficulty: {"problem", "solution", "answer", "level"}, the names of the MATH data."""
    largest = LARGEST[difficulty]
    lines = arithmetic(rng, difficulty + 1, largest) if rng.random() < 0.5 else equation(rng, difficulty, largest)
    answer = lines[-1].removeprefix("x = ")
    solution = "\n\n".join([*lines[1:-1], f"x = \\boxed{{{answer}}}"])
    return dict(problem=QUESTION + lines[0], solution=solution, answer=answer, level=difficulty)


def is_test(problem):
    return zlib.crc32(problem.encode()) % TEST_SHARE == 0


def make(*, train, test, difficulty=2, seed=0):
    """{"train": [...], "test": [...]}, no problem twice. UserError where the difficulty has not so many."""
    if difficulty not in LARGEST:
        raise UserError(f"difficulty {difficulty}: give one of {', '.join(map(str, LARGEST))}.")
    if min(train, test) < 1:
        raise UserError(f"{train} training and {test} test problems: give at least 1 of each.")
    rng, wanted, tries = random.Random(seed), {"train": train, "test": test}, 0
    made = {"train": {}, "test": {}}
    while any(len(made[split]) < wanted[split] for split in made):
        tries += 1
        if tries > 20 * (train + test) + 1000:
            counts = " and ".join(f"{len(made[split])} of {wanted[split]} {split}" for split in made)
            raise UserError(f"difficulty {difficulty} gave only {counts} problems that differ: ask for fewer, or a higher difficulty.")
        drawn = draw(rng, difficulty)
        split = "test" if is_test(drawn["problem"]) else "train"
        if len(made[split]) < wanted[split]:
            made[split].setdefault(drawn["problem"], drawn)
    return {split: list(problems.values()) for split, problems in made.items()}


def write(problems, path):
    """JSON lines, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{path.parent} cannot be made ({e.strerror}): give another --out.") from e
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        try:
            file.writelines(json.dumps(problem) + "\n" for problem in problems)
        except OSError:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_DATA, help="folder of train.jsonl and test.jsonl (default: %(default)s)")
    parser.add_argument("--train", type=int, default=8000, help="training problems (default: %(default)s)")
    parser.add_argument("--test", type=int, default=400, help="test problems (default: %(default)s)")
    parser.add_argument("--difficulty", type=int, default=2, help="1 to 4 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems drawn (default: %(default)s)")
    parser.add_argument("--show", type=int, default=1, help="training problems to print (default: %(default)s)")
    args = parser.parse_args()
    made = make(train=args.train, test=args.test, difficulty=args.difficulty, seed=args.seed)
    for split, problems in made.items():
        write(problems, args.out / f"{split}.jsonl")
    for problem in made["train"][: args.show]:
        print(f"{problem['problem']}\n\n{problem['solution']}\n")
    print(f"{args.train} training and {args.test} test problems in {args.out}")


if __name__ == "__main__":
    run_script(main)
