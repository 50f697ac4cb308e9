"""Evaluate an agent on every task of a split, each exactly once per repeat:

    python eval.py runs/capo_action-alfworld-.../export              the export of a run, with the run's own settings
    python eval.py Qwen/Qwen3-4B-Instruct-2507 --env alfworld        a hub name or any Hugging Face folder
    python eval.py runs/.../checkpoints/000040                       a checkpoint
    python eval.py random | expert                                   a random admissible action; ALFWorld's handcoded expert

Prints a table per task family with mean and standard error; writes JSON with `--json`, readable transcripts with `--render`.
`torchrun --nproc_per_node=8 eval.py ...` spreads the tasks over ranks.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
from tqdm import tqdm

import rollout


class Stopped(Exception):
    """The run was asked to stop while trajectories were being played."""


class Progress:
    """Progress bar over trajectories with the success rate as it moves; `stop()` true ends the rollout with `Stopped`."""

    def __init__(self, total: int, label: str, *, show: bool = True, stop=lambda: False):
        self.bar = tqdm(total=total, desc=label, disable=not show, leave=False, mininterval=0.5)
        self.stop, self.done, self.successes, self.failed = stop, 0, 0, 0

    def __call__(self, trajectory):
        self.done += 1
        self.successes += trajectory.success
        self.failed += bool(trajectory.failed)
        self.bar.update()
        self.bar.set_postfix(success=f"{self.successes / max(1, self.done - self.failed):.2f}", refresh=False)
        if self.stop():
            raise Stopped

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()


def play_all(engine, pool, env, tokenizer, tasks, *, repeats=1, ranks, seed, iteration=0, label="evaluation", stop=lambda: False, **play):
    """Play every task `repeats` times, spread over the ranks -> (rows, trajectories), the same on every rank.

    A group is one task. The sampling seed depends on (seed, iteration, task, repeat, step) alone: two agents that are
    evaluated meet the same games with the same luck. When `stop()` turns true both lists come back incomplete.
    """
    total = len(tasks) * repeats
    mine = range(ranks.rank * total // ranks.world, (ranks.rank + 1) * total // ranks.world)  # a group's game starts once and is remembered
    todo = [rollout.Assignment(traj=n, group=n // repeats, task=tasks[n // repeats], sample=n % repeats) for n in mine]
    with Progress(len(todo), label, show=ranks.rank == 0, stop=stop) as progress:
        try:
            played = rollout.rollout(engine, pool, env, tokenizer, todo, run_seed=seed, iteration=iteration, progress=progress, **play)
        except Stopped:
            played = [], []
    parts = ranks.gather(played)
    rows = sorted((r for p in parts for r in p[0]), key=lambda r: (r.traj, r.step))
    return rows, sorted((t for p in parts for t in p[1]), key=lambda t: t.traj)


def summary(rows, trajectories) -> dict:
    """Primary score, its standard error over tasks, and what else describes the play. A failed trajectory is left out and counted."""
    done = [t for t in trajectories if not t.failed]
    seen, revisits = set(), 0
    for r in rows:
        revisits += (r.traj, r.observation) in seen
        seen.add((r.traj, r.observation))
    by_task = {}
    for t in done:
        by_task.setdefault(t.task, []).append(primary(t))
    per_task = [float(np.mean(x)) for x in by_task.values()]
    return {
        "success": float(np.mean([primary(t) for t in done])) if done else 0.0,
        "stderr": float(np.std(per_task, ddof=1) / np.sqrt(len(per_task))) if len(per_task) > 1 else 0.0,
        "n": len(done),
        "failed": len(trajectories) - len(done),
        "steps": float(np.mean([t.steps for t in done])) if done else 0.0,
        "truncated": float(np.mean([t.truncated for t in done])) if done else 0.0,
        "invalid": float(np.mean([r.invalid for r in rows])) if rows else 0.0,
        "revisits": revisits / max(1, len(rows)),
        "reply_tokens": float(np.mean([len(r.response_ids) for r in rows])) if rows else 0.0,
    }


def primary(t) -> float:
    return float(t.success)
