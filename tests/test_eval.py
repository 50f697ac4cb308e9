"""eval.py: every task exactly once, numbers by hand, scripted agents, the command."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks_worker import play
from tiny_agent import tiny_agent

import envs
import eval as evaluation
import rollout
from envs import UserError

ROOT = Path(__file__).resolve().parent.parent
GAME = "tests.example_env:GuessNumber"


class OneProcess:
    """The ranks of a process that runs alone, or rank r of several whose parts are gathered by the test."""

    def __init__(self, rank=0, world=1):
        self.rank, self.world, self.parts = rank, world, None

    def gather(self, thing):
        self.parts = thing
        return [thing]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    return tiny_agent(tmp_path_factory.mktemp("agent"))


def ids(trajectories):
    return [t.task for t in trajectories]


# ----------------------------------------------------------------------------------------------------- each task once


@pytest.mark.parametrize("n", [1, 32, 140])
def test_every_task_is_played_exactly_once(agent, n):
    rows, trajectories = play(agent, OneProcess(), n, max_steps=1)
    tasks = envs.environment(GAME).tasks("train")[:n]
    assert ids(trajectories) == [task.id for task in tasks]
    assert [t.traj for t in trajectories] == [t.group for t in trajectories] == list(range(n))
    assert {r.traj for r in rows} == set(range(n)) and not any(t.failed for t in trajectories)


@pytest.mark.parametrize("n, repeats, world", [(1, 1, 2), (5, 3, 4)])
def test_several_ranks_play_each_task_once_a_repeat_between_them(agent, n, repeats, world):
    trajectories = []
    for rank in range(world):
        ranks = OneProcess(rank, world)
        play(agent, ranks, n, repeats=repeats, max_steps=1)
        trajectories += ranks.parts[1]
    assert sorted(t.traj for t in trajectories) == list(range(n * repeats))
    assert set(Counter(ids(trajectories)).values()) == {repeats} and len(set(ids(trajectories))) == n
    assert all(len({t.task for t in trajectories if t.group == g}) == 1 for g in range(n))


def test_repeats_are_other_samples_of_the_same_tasks_and_a_seed_repeats(agent):
    rows, trajectories = play(agent, OneProcess(), 4, repeats=2)
    replies = {(r.group, r.traj % 2, r.step): r.response_ids.tolist() for r in rows}
    assert any(replies[g, 0, 0] != replies[g, 1, 0] for g in range(4))
    again = play(agent, OneProcess(), 4, repeats=2)
    assert [r.response_ids.tolist() for r in again[0]] == [r.response_ids.tolist() for r in rows]
    assert [(t.task, t.success, t.steps) for t in again[1]] == [(t.task, t.success, t.steps) for t in trajectories]


def test_a_task_that_is_listed_twice_is_played_with_other_luck(agent):
    """An iteration may draw a task twice; the copies were once the same trajectory, token for token."""
    for repeats in (1, 2):
        rows, trajectories = play(agent, OneProcess(), 2, copies=2, repeats=repeats)
        once, of_once = play(agent, OneProcess(), 2, repeats=2 * repeats)
        assert [t.group for t in trajectories] == [n // repeats for n in range(4 * repeats)]

        def replies(rows, trajectories):
            tasks = {t.traj: t.task for t in trajectories}
            return {task: sorted(tuple(r.response_ids) for r in rows if r.step == 0 and tasks[r.traj] == task) for task in tasks.values()}

        twice = replies(rows, trajectories)
        assert twice == replies(once, of_once), "as so many repeats"
        assert all(len(set(x)) == 2 * repeats for x in twice.values())


def test_spread_takes_tasks_at_even_distances():
    tasks = list("aabbccddee")
    assert evaluation.spread(tasks, 0) == evaluation.spread(tasks, 10) == evaluation.spread(tasks, 99) == tasks
    assert evaluation.spread(tasks, 5) == list("abcde") and evaluation.spread(tasks, 1) == ["a"]
    for n in range(1, 10):
        assert len(evaluation.spread(range(10), n)) == len(set(evaluation.spread(range(10), n))) == n


# ----------------------------------------------------------------------------------------------------- numbers by hand


def row(traj, step, observation, *, invalid=False, reply=2, prompt=10):
    empty = np.zeros(0, np.float32)
    return rollout.Row(
        traj, traj, step, np.zeros(prompt, np.int32), np.zeros(reply, np.int32), empty, observation, "go", 0.0, invalid, "stop", {}
    )


def trajectory(traj, task, kind, steps, *, success=False, failed=None):
    return rollout.Trajectory(
        traj, traj, task, kind, float(success), success, float(success), steps, success, not success and not failed, failed
    )


PLAYED = (
    [
        row(0, 0, "hall"), row(0, 1, "kitchen", reply=4), row(0, 2, "hall", invalid=True), row(0, 3, "hall"),  # two revisits
        row(1, 0, "hall", prompt=20), row(1, 1, "attic"),  # another trajectory's hall is not one
        row(2, 0, "hall", reply=8), row(2, 1, "cellar"),
    ],
    [
        trajectory(0, "a", "pick", 4), trajectory(1, "a", "pick", 2, success=True), trajectory(2, "b", "look", 2, success=True),
        trajectory(3, "c", "look", 0, failed="its worker died"),
    ],
)  # fmt: skip


def test_the_summary_by_hand():
    x = evaluation.summary(*PLAYED)
    assert (x["n"], x["failed"]) == (3, 1)
    assert x["success"] == pytest.approx(2 / 3)  # the failed one is in no mean
    # Over tasks a: 0.5 and b: 1, sample standard deviation 0.25 sqrt(2), by sqrt(2)
    assert x["stderr"] == pytest.approx(0.25)
    assert x["steps"] == pytest.approx(8 / 3) and x["truncated"] == pytest.approx(1 / 3)
    assert x["invalid"] == 1 / 8 and x["revisits"] == 2 / 8
    assert x["reply_tokens"] == 24 / 8 and x["prompt_tokens"] == 90 / 8


def test_the_summary_of_nothing_is_zero_and_finite():
    for trajectories in ([], [trajectory(0, "a", "pick", 0, failed="no")]):
        x = evaluation.summary([], trajectories)
        assert x["n"] == 0 and x["failed"] == len(trajectories)
        assert all(np.isfinite(value) for value in x.values())
    assert evaluation.summary([], [trajectory(0, "a", "pick", 1, success=True)])["stderr"] == 0.0


def test_the_table_has_a_line_per_family_and_one_for_all():
    text, result = evaluation.table(*PLAYED)
    assert list(result) == ["look", "pick", "all"]
    assert result["all"] == evaluation.summary(*PLAYED)
    assert (result["pick"]["n"], result["pick"]["success"], result["pick"]["failed"]) == (2, 0.5, 0)
    assert (result["look"]["n"], result["look"]["success"], result["look"]["failed"]) == (1, 1.0, 1)
    assert result["pick"]["revisits"] == 2 / 6 and result["look"]["revisits"] == 0
    lines = text.splitlines()
    assert len(lines) == 4
    assert [lines[0].split()[0], *(line.split()[0] for line in lines[1:])] == ["family", "look", "pick", "all"]
    assert lines[2].split() == ["pick", "2", "0.500", "0.000", "3.0", "0.333", "0.167", "0"]
    assert lines[3].split() == ["all", "3", "0.667", "0.250", "2.7", "0.250", "0.125", "1"]


def test_a_transcript_reads_in_order():
    rows, trajectories = PLAYED
    text = evaluation.transcript(rows, trajectories[0], SimpleNamespace(decode=lambda ids: f"{len(ids)} tokens"))
    assert text.startswith("==== a (pick): truncated after 4 steps\n")
    places = [
        text.index(part) for part in ("-- step 1\nhall", ">> 2 tokens", "-- step 2\nkitchen", ">> 4 tokens", "-- step 3", "-- step 4")
    ]
    assert places == sorted(places) and "attic" not in text and text.count("[invalid") == 1
    assert "its worker died" in evaluation.transcript(rows, trajectories[3], None)
    assert "success after 2 steps" in evaluation.transcript(rows, trajectories[1], SimpleNamespace(decode=str))


# ------------------------------------------------------------------------------------------------- agents, the command


def test_a_random_agent_plays_every_task(capsys, tmp_path):
    out = tmp_path / "random.json"
    evaluation.main(
        ["random", "--env", GAME, "--max_steps", "30", "--json", str(out), "--render", str(tmp_path / "t.txt"), "--episodes", "2"]
    )
    result = json.loads(out.read_text())
    tasks = envs.environment(GAME).tasks("valid_unseen")
    assert [t["task"] for t in result["trajectories"]] == [task.id for task in tasks]
    x = result["families"]["all"]
    assert x["n"] == 20 and x["success"] > 0.5  # 30 guesses of 8 or 12
    assert x["success"] == np.mean([t["success"] for t in result["trajectories"]])
    said = capsys.readouterr().out
    assert "up_to_8" in said and "up_to_12" in said and "20 tasks x 1" in said
    assert (tmp_path / "t.txt").read_text().count("====") == 2


def test_repeats_of_a_random_agent_differ(tmp_path):
    tasks = envs.environment(GAME).tasks("valid_unseen")[:3] * 4
    rows, trajectories = evaluation.play_scripted(GAME, tasks, "random", max_steps=6, seed=0)
    assert len(trajectories) == 12 and len({tuple(r.action for r in rows if r.traj == t) for t in range(12)}) > 3
    x = evaluation.summary(rows, trajectories)
    assert x["n"] == 12 and x["stderr"] == pytest.approx(
        np.std([np.mean([t.success for t in trajectories if t.task == task.id]) for task in tasks[:3]], ddof=1) / np.sqrt(3)
    )


def test_what_an_agent_can_be(tmp_path):
    assert evaluation.find_run("random") == ("random", None, None)
    run = {"settings": {"model": "m"}, "env": "alfworld"}
    for folder in ("run/checkpoints/000002", "run/checkpoints/000010", "run/checkpoints/.000020.tmp", "run/checkpoints/000030"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match="no checkpoint yet"):
        evaluation.find_run(str(tmp_path / "run"))
    for number in ("000002", "000010"):
        (tmp_path / "run/checkpoints" / number / "meta.json").write_text("{}")
    assert evaluation.find_run(str(tmp_path / "run")) == ("m", run, tmp_path / "run/checkpoints/000010")
    assert evaluation.find_run(str(tmp_path / "run/checkpoints/000002")) == ("m", run, tmp_path / "run/checkpoints/000002")
    (tmp_path / "run/export").mkdir()
    (tmp_path / "run/export/run.json").write_text(json.dumps(run))
    for path in ("run/export", "run"):
        assert evaluation.find_run(str(tmp_path / path)) == (str(tmp_path / "run/export"), run, None)


@pytest.mark.parametrize(
    "flags, said", [(["--split", "test"], "valid_unseen"), (["--env", "alfworld", "--data", "/no/such"], "alfworld-download")]
)
def test_bad_input_of_a_scripted_evaluation(flags, said):
    with pytest.raises(UserError, match=said):
        evaluation.main(["random", "--env", GAME, *flags])


def test_an_unknown_flag_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as error:
        evaluation.main(["random", "--temp", "1"])
    assert error.value.code == 2 and "--temp" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_print_the_table_of_one(agent, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    flags = [
        "eval.py",
        agent,
        "--env",
        GAME,
        "--engine",
        "transformers",
        "--prompt_tokens",
        "900",
        "--response_tokens",
        "10",
        "--max_steps",
        "4",
    ]
    results = []
    for n in (1, 2):
        out = tmp_path / f"{n}.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", *flags, "--json", str(out)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("family ") == 1
        results.append(json.loads(out.read_text()))
    assert results[0] == results[1]
    assert [t["task"] for t in results[0]["trajectories"]] == [task.id for task in envs.environment(GAME).tasks("valid_unseen")]
