"""Seconds that contextual credit costs, and what they grow with.

    python bench/credit.py                 # the size of the paper's ALFWorld batch: 16 tasks x 8 rollouts x 50 steps; a minute

Random batches: every task has a number of observations that its steps see at random. Times are the best of three, wall clock.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np  # noqa: E402

from ccpo_context import context_features, contextual_credit  # noqa: E402


def batch(tasks, rollouts, steps, width, observations, seed=0):
    """Rows of `contextual_credit`: outcomes 0 or 10, one observation of the task's at each step."""
    rng, n = np.random.default_rng(seed), tasks * rollouts * steps
    traj = np.repeat(np.arange(tasks * rollouts), steps)
    return dict(
        task=traj // rollouts, traj=traj, step=np.tile(np.arange(steps), tasks * rollouts), obs=rng.integers(observations, size=n).tolist(),
        hidden=rng.normal(size=(n, width)), outcome=np.repeat(10.0 * rng.integers(2, size=tasks * rollouts), steps), invalid=np.zeros(n),
    )  # fmt: skip


def seconds(function) -> float:
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
    return best


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--rollouts", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=1536, help="of the hidden state (default %(default)s)")
    args = parser.parse_args(argv)
    print(f"{'tasks':>6s} {'rows':>6s} {'observations':>13s} {'sum of squared buckets':>23s} {'seconds':>8s} {'of them features':>17s}")
    for tasks, observations in ((args.tasks // 4, 10), (args.tasks // 2, 10), (args.tasks, 10), (args.tasks, 40), (args.tasks, 1)):
        rows = batch(max(1, tasks), args.rollouts, args.steps, args.width, observations)
        buckets = np.unique(np.stack([rows["task"], rows["obs"]], 1), axis=0, return_counts=True)[1]
        whole = seconds(lambda rows=rows: contextual_credit(**rows))
        features = seconds(lambda rows=rows: context_features(rows["hidden"], np.zeros((len(rows["hidden"]), 37))))
        squares = int((buckets.astype(float) ** 2).sum())
        print(f"{max(1, tasks):6d} {len(rows['task']):6d} {observations:13d} {squares:23,d} {whole:8.2f} {features:17.2f}", flush=True)


if __name__ == "__main__":
    main()
