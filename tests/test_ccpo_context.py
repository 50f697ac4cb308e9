"""CCPO against given numbers, against slow loops written apart, and against the properties of its equations."""

import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np
import oracle_ccpo_context as oracle
import pytest
import splits
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ccpo_context as ccpo

VECTORS = json.loads((Path(__file__).parent / "vectors" / "ccpo_context.json").read_text())
NAN, INF = math.nan, math.inf
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 10**6)
KERNELS = ("exp", "uniform", "cosine")


# ------------------------------------------------------------------------------------------------- helpers


def t64(x):
    return torch.as_tensor(x, dtype=torch.float64)


def close(actual, expected, tol=1e-9):
    """Equal to tol; None and NaN stand for undefined."""
    actual, expected = (
        np.array([NAN if v is None else v for v in np.asarray(x, dtype=object).flatten()], dtype=np.float64).reshape(np.shape(x))
        for x in (actual, expected)
    )
    assert actual.shape == expected.shape, f"{actual.shape} instead of {expected.shape}"
    assert np.allclose(actual, expected, rtol=tol, atol=tol, equal_nan=True), f"{actual}\n{expected}"


def columns(rows):
    """A list of rows as lists of the columns that `contextual_credit` takes."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def random_rows(seed, *, tasks=3, trajectories=4, longest=6, copies=True, shuffle=True):
    """Ragged rows of some tasks. All rollouts of a task share the first observation and, often, its very hidden state;
    ids are no positions; two tasks share their observations. Four or five different hidden states leave nothing, or one
    direction, after the projection, and peers at equal distances: these are tests of their own."""
    rng = random.Random(seed)
    width = rng.randint(6, 9)
    while True:
        rows = []
        for task in range(rng.randint(1, tasks)):
            first, same_start = [rng.gauss(0, 1) for _ in range(width)], rng.random() < 0.7
            for i in range(rng.randint(1, trajectories)):
                outcome = rng.choice([0.0, 10.0, 10.0, rng.gauss(0, 3)])
                for step in range(rng.randint(1, longest)):
                    hidden = first if step == 0 and same_start else [rng.gauss(0, 1) for _ in range(width)]
                    obs = "start" if step == 0 else rng.choice("abcd")
                    rows.append(dict(task=70 - task, traj=100 * task + 7 * i, step=step, obs=obs, hidden=hidden, outcome=outcome,
                                     invalid=rng.random() < 0.2))  # fmt: skip
        if len(rows) <= 3 or len({tuple(r["hidden"]) for r in rows}) >= 6:
            break
    if copies:
        rows += [dict(rng.choice(rows)) for _ in range(rng.choice([0, 0, 3]))]
    if shuffle:
        rng.shuffle(rows)
    return rows


def random_settings(seed):
    rng = random.Random(seed)
    return dict(
        gamma=rng.choice([0.95, 0.5, 1.0, 0.0]), eta=rng.choice([0.1, 0.0, 1.0]), k_future=rng.choice([2, 1, 3, 50]),
        normalize=rng.choice(["task", "none"]), kernel=rng.choice(KERNELS), exclude_self=rng.random() < 0.7,
        summary_weight=rng.choice([1.0, 1.0, 0.0, 0.3]), history_weight=rng.choice([1.0, 1.0, 0.0, 0.5]),
        future_weight=rng.choice([1.0, 1.0, 0.0, 2.0]),
    )  # fmt: skip


def credit(rows, **options):
    return ccpo.contextual_credit(**columns(rows), **options)


def game(*trajectories, task=0, hidden=None):
    """Rows of small trajectories of one task: (outcome, observations, steps with an invalid action)."""
    rows = []
    for i, (outcome, observations, *invalid) in enumerate(trajectories):
        for t, obs in enumerate(observations):
            h = [1.0] * 6 if hidden is None else hidden(i, t)
            rows.append(dict(task=task, traj=10 * task + i, step=t, obs=obs, hidden=h, outcome=outcome, invalid=t in set(*invalid)))
    return rows


def scattered(seed=0, width=8):
    rng = random.Random(seed)
    return lambda i, t: [rng.gauss(0, 1) for _ in range(width)]


# ------------------------------------------------------------------------------------------------- given numbers


@pytest.mark.parametrize("case", VECTORS["thermometer"])
def test_vectors_thermometer(case):
    bins = ccpo.thermometer(case["value"], case["bound"])
    assert bins.tolist() == [1.0] * case["bits"] + [0.0] * (12 - case["bits"])


@pytest.mark.parametrize("case", VECTORS["summary"])
def test_vectors_summary(case):
    close(ccpo.context_summary(case["observations"]), case["summary"])


@pytest.mark.parametrize("case", VECTORS["credit"])
def test_vectors_credit(case):
    result = credit(case["rows"], **case["settings"])
    for name in set(case) - {"rows", "settings", "a_ep_zscore", "a_ep_center"}:
        close(result[name], case[name])
    rows = {name: column for name, column in columns(case["rows"]).items() if name in ("task", "outcome", "invalid")}
    close(ccpo.episode_advantage(**rows), case["a_ep_zscore"])
    close(ccpo.episode_advantage(**rows, normalize="center"), case["a_ep_center"])


@pytest.mark.parametrize("case", VECTORS["dual_clip"])
def test_vectors_dual_clip(case):
    z, adv = t64(case["log_ratio"]), t64(case["advantages"])
    close(ccpo.dual_clip_loss(z, adv, eps=case["eps"], c=case["c"]), case["per_token_loss"])
    close(ccpo.dual_clip_loss(z, adv), case["per_token_loss"])  # 0.2 and 3 are the defaults


# ------------------------------------------------------------------------------------------------- the slow loops


@pytest.mark.parametrize("block", range(4))
def test_oracle_credit(block):
    for seed in range(50 * block, 50 * block + 50):
        rows, options = random_rows(seed), random_settings(seed)
        if seed % 3 == 0:
            rng = random.Random(seed)
            returns = {(r["traj"], r["step"]): rng.gauss(0, 5) for r in rows}
            options["env_return"] = [returns[r["traj"], r["step"]] for r in rows]
        result, expected = credit(rows, **options), oracle.contextual_credit(**columns(rows), **options)
        assert set(result) == set(expected)
        for name in expected:
            close(result[name], expected[name])


def test_oracle_episode():
    for seed in range(50):
        table = {name: column for name, column in columns(random_rows(seed)).items() if name in ("task", "outcome", "invalid")}
        for normalize in ("zscore", "center"):
            for eta in (0.1, 0.0, 3.0):
                options = dict(eta=eta, normalize=normalize)
                close(ccpo.episode_advantage(**table, **options), oracle.episode_advantage(**table, **options))


def test_oracle_dual_clip():
    rng = random.Random(0)
    for eps, c in ((0.2, 3.0), (0.1, 1.5), (0.3, 5.0)):
        z, adv = ([rng.gauss(0, scale) for _ in range(300)] for scale in (1.5, 1.0))
        z[:4] = [100.0, -100.0, 0.0, 21.0]
        close(ccpo.dual_clip_loss(t64(z), t64(adv), eps=eps, c=c), [oracle.dual_clip_loss(x, a, eps, c) for x, a in zip(z, adv)])


# ------------------------------------------------------------------------------------------------- features


def test_the_share_of_distinct_observations_is_not_rounded_below_a_bin():
    for steps in range(1, 60):
        for distinct in range(1, steps + 1):
            assert ccpo.thermometer(distinct / steps, 1).sum() == 12 * distinct // steps


def test_summary_by_hand():
    rows = ccpo.context_summary(["a", "b", "a", "c"])
    lit = [(row[:12].sum(), row[12:24].sum(), row[24:36].sum(), row[36]) for row in rows]
    assert rows.shape == (4, 37) and lit == [(0, 0, 12, 0), (0, 0, 12, 0), (0, 0, 8, 1), (1, 1, 9, 0)]
    long = ccpo.context_summary([str(t) for t in range(40)])[-1]
    assert long.tolist() == [1.0] * 36 + [0.0]


def test_features_of_one_two_and_three_steps():
    """One step: the hidden state as it is. Two or three: centred, nothing removed."""
    summary = np.eye(37)[:3]
    root = math.sqrt(0.5)
    close(ccpo.context_features([[3.0, 4.0]], summary[:1])[0, :3], [0.6 * root, 0.8 * root, root])
    two = ccpo.context_features([[1.0, 5.0], [1.0, 1.0]], summary[:2])
    close(two[:, :4], [[0, root, root, 0], [0, -root, 0, root]])
    three = ccpo.context_features([[4.0, 0.0], [0.0, 3.0], [-4.0, -3.0]], summary)
    close(three[:, :2], [[root, 0], [0, root], [-0.8 * root, -0.6 * root]])


def test_features_lose_the_three_leading_directions():
    """Three large directions and a small fourth one: only the fourth is left, whatever the sizes along the others."""
    rng = np.random.default_rng(0)
    n, basis = 12, np.linalg.qr(rng.standard_normal((7, 7)))[0]
    small = np.array([1.0, -2.0] * (n // 2))
    small -= small.mean()
    large = np.linalg.qr(np.concatenate([np.ones((n, 1)), small[:, None], rng.standard_normal((n, 3))], 1))[0][:, 2:]
    hidden = 5.0 + (large * [300.0, 200.0, 100.0]) @ basis[:3] + 0.01 * small[:, None] * basis[3]
    summary = np.tile(np.eye(37)[0], (n, 1))
    features = ccpo.context_features(hidden, summary)
    sign = np.sign(small)[:, None]
    close(features[:, :7], sign * basis[3] / math.sqrt(2), 1e-6)
    close(features[:, 7], [math.sqrt(0.5)] * n)
    close(ccpo.context_features(hidden, summary, summary_weight=0.0)[:, :7], sign * basis[3], 1e-6)
    half = ccpo.context_features(hidden, summary, summary_weight=0.5)
    close(half[:, 7], [0.5 / math.sqrt(1.25)] * n)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_four_steps_leave_no_hidden_state_and_no_noise(scale):
    """After centring four points span three directions: the rest is rounding, which must not pick the peers."""
    hidden, summary = scale * np.random.default_rng(1).standard_normal((4, 9)), np.eye(37)[:4]
    close(ccpo.context_features(hidden, summary), np.concatenate([np.zeros((4, 9)), summary], 1), 0)
    assert (ccpo.context_features(np.ones((5, 6)), np.eye(37)[:5], summary_weight=0.0) == 0).all()


@few
@given(seeds)
def test_shift_scale_and_rotation_of_the_hidden_states_change_nothing(seed):
    rows, options = random_rows(seed), random_settings(seed)
    rng = np.random.default_rng(seed)
    hidden = np.array([row["hidden"] for row in rows])
    rotation = np.linalg.qr(rng.standard_normal((hidden.shape[1],) * 2))[0]
    before = credit(rows, **options)
    several = len({(r["traj"], r["step"]) for r in rows}) > 1  # one step is taken as it is
    moved = hidden @ rotation * rng.choice([1e-2, 0.5, 30.0]) + several * rng.standard_normal(hidden.shape[1])
    after = credit([dict(row, hidden=h) for row, h in zip(rows, moved)], **options)
    for name in before:
        close(after[name], before[name], 1e-6)


def test_equal_rows_have_distance_exactly_zero():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.standard_normal((20, 1573)), 3, 0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    distance = ccpo._distances(x)
    same = np.arange(60)[:, None] // 3 == np.arange(60) // 3
    assert (distance[same] == 0).all() and (distance[~same] > 1).all() and (distance == distance.T).all()
    near = np.stack([x[0], x[0] + 1e-8 * x[4], x[0] + 3e-8 * x[4], x[0] + 1e-5 * x[4]])
    close(ccpo._distances(near)[0] * 1e8, [0, 1, 3, 1000], 1e-5)


def test_one_prompt_has_one_hidden_state():
    """That of the smallest (trajectory, step), in whatever order the rows come."""
    hidden = np.arange(10.0).reshape(5, 2)
    prompts = [[1, 2], [3], [1, 2], [1, 2], [12]]
    traj, step = [5, 5, 2, 2, 9], [0, 1, 1, 0, 0]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        shared = ccpo.shared_hidden(hidden[order], [prompts[k] for k in order], traj=[traj[k] for k in order],
                                    step=[step[k] for k in order])  # fmt: skip
        close(shared, hidden[[3, 1, 3, 3, 4]][order])
    assert hidden.tolist() == np.arange(10.0).reshape(5, 2).tolist()


# ------------------------------------------------------------------------------------------------- peers and readouts


def served(rows, **options):
    """{(traj, step): (peers as (traj, step), fallback)} of the rows' steps."""
    keys = sorted({(r["traj"], r["step"], r["task"], r["obs"]) for r in rows})
    traj, task = (np.array([k[i] for k in keys]) for i in (0, 2))
    obs = np.unique([k[3] for k in keys], return_inverse=True)[1]
    found = {}
    for queries, bucket, fallback in ccpo.peer_buckets(task=task, traj=traj, obs=obs, **options):
        weights, _ = ccpo.peer_weights(np.zeros((len(keys), 3)), queries, bucket, traj=traj, kernel="uniform", **options)
        for q, w in zip(queries, weights):
            assert keys[q][:2] not in found, "served twice"
            found[keys[q][:2]] = [keys[v][:2] for v, x in zip(bucket, w) if x], fallback
    return found


def test_peers_by_hand():
    rows = game((10.0, "aba"), (0.0, "ac")) + game((0.0, "ab"), task=1)
    found = served(rows)
    assert found == {
        (0, 0): ([(1, 0)], False),
        (0, 1): ([(1, 0), (1, 1)], True),
        (0, 2): ([(1, 0)], False),
        (1, 0): ([(0, 0), (0, 2)], False),  # each visit counts
        (1, 1): ([(0, 0), (0, 1), (0, 2)], True),
    }  # and nobody for the lone trajectory of the other task, which saw the same
    all_in = served(rows, exclude_self=False)
    assert all_in[0, 0] == all_in[1, 0] == ([(0, 0), (0, 2), (1, 0)], False)
    assert all_in[0, 1] == ([(0, 1)], False) and all_in[10, 0] == ([(10, 0)], False)


def test_weights_by_hand():
    """Four points on a line, trajectories 0 0 1 1: distances 1, 2, 2, 3, 4, 5, median 2.5 with the pairs within a trajectory."""
    x, traj, every = np.array([[0.0], [1.0], [3.0], [5.0]]), np.array([0, 0, 1, 1]), np.arange(4)
    weights, tau = ccpo.peer_weights(x, every, every, traj=traj)
    assert tau == pytest.approx(0.15 * 2.5)
    far = [math.exp(-d / 0.375) for d in range(6)]
    close(weights, [[0, 0, far[3], far[5]], [0, 0, far[2], far[4]], [far[3], far[2], 0, 0], [far[5], far[4], 0, 0]])
    weights, tau = ccpo.peer_weights(x, np.array([3, 0]), every, traj=traj, exclude_self=False)  # queries in any order
    close(weights, [[far[5], far[4], far[2], 1], [1, far[1], far[3], far[5]]])
    weights, tau = ccpo.peer_weights(x, every, every, traj=traj, kernel="uniform")
    close(weights, (traj[:, None] != traj).astype(float))
    close(tau, 0.375)
    for equal in (np.ones((4, 2)), np.ones((4, 2)) + 1e-10 * np.arange(4)[:, None]):  # no bandwidth to speak of
        weights, tau = ccpo.peer_weights(equal, every, every, traj=traj)
        assert tau == 0.15
        close(weights, (traj[:, None] != traj).astype(float), 1e-8)


def test_cosine_weights_by_hand():
    """Max(cos, 0); where no peer points the same way the nearest peer counts alone, never one's own trajectory."""
    x = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.6, 0.8], [-0.8, -0.6], [0.8, -0.6]])
    traj, every = np.array([0, 1, 1, 0, 2, 2]), np.arange(6)
    weights, _ = ccpo.peer_weights(x, every, every, traj=traj, kernel="cosine")
    cos = np.maximum(x @ x.T, 0) * (traj[:, None] != traj)
    assert cos[2].tolist() == [0, 0, 0, 0, 0.8, 0] and (cos.sum(1) > 0).all()
    close(weights, cos)
    for noise in (0.0, 1e-17):  # a cosine of 0 may come out above it
        weights, _ = ccpo.peer_weights(x[:3] + noise, every[:3], every[:3], traj=traj[:3], kernel="cosine")
        close(weights, [[0, 1, 0], [1, 0, 0], [1, 0, 0]])


def test_readout_by_hand():
    close(ccpo.readout(np.array([[1.0, 3.0], [0.0, 0.0], [1e-13, 1e-13]]), np.array([10.0, 2.0])), [4.0, 0.0, 1.2])


@few
@given(seeds)
def test_a_readout_lies_within_what_its_peers_have(seed):
    rng = np.random.default_rng(seed)
    n = rng.integers(2, 12)
    traj = np.concatenate([[0, 1], rng.integers(0, 3, n - 2)])
    x, values, every = ccpo._unit(rng.standard_normal((n, 4))), rng.standard_normal(n), np.arange(n)
    for kernel in KERNELS:
        weights, _ = ccpo.peer_weights(x, every, every, traj=traj, kernel=kernel)
        for u, read in enumerate(ccpo.readout(weights, values)):
            peers = values[traj != traj[u]]
            if weights[u].sum() > 1e-12:
                assert peers.min() - 1e-9 <= read <= peers.max() + 1e-9


def test_identical_features_give_uniform_weights():
    rows = game((10.0, "aab"), (0.0, "abca", {1}), (3.0, "cb"))
    equal, uniform = (credit(rows, summary_weight=0.0, kernel=kernel) for kernel in ("exp", "uniform"))
    for name in equal:
        close(equal[name], uniform[name])


def test_noise_between_equal_prompts_would_pick_the_peers():
    """Why equal prompts share one hidden state: at first steps, noise of 1e-7 decides as much as any difference."""
    draw, rng = scattered(3), random.Random(4)
    first = draw(0, 0)
    rows = game((10.0, "ab"), (0.0, "ac"), (7.0, "acd"), hidden=lambda i, t: draw(i, t) if t else first)
    noisy = [dict(r, hidden=[x + rng.gauss(0, 1e-7) for x in r["hidden"]]) for r in rows]
    quiet, loud = (credit(r, kernel="exp")["baseline"] for r in (rows, noisy))
    start = [n for n, r in enumerate(rows) if r["step"] == 0]
    assert max(abs(quiet[start] - loud[start])) > 1
    prompts = [[r["task"], r["step"]] if r["step"] == 0 else [r["traj"], r["step"]] for r in rows]
    table = columns(noisy)
    shared = ccpo.shared_hidden(table["hidden"], prompts, traj=table["traj"], step=table["step"])
    close(ccpo.contextual_credit(**{**table, "hidden": shared})["baseline"], quiet, 1e-4)


# ------------------------------------------------------------------------------------------------- credit


def test_credit_by_hand():
    """Equal summaries at the start and no hidden state: both readouts are the other trajectory's own numbers."""
    result = credit(game((10.0, "ab", {0}), (0.0, "abb", {1})), gamma=0.5, kernel="uniform")
    close(result["return_target"], [5 - 0.1, 10, 0, -0.1, 0])
    close(result["outcome_target"], [2.5, 5, 0, 0, 0])
    close(result["baseline"], [0, -0.05, 4.9, 10, 10])
    close(result["value"], [0, 0, 2.5, 5, 5])
    close(result["historical"], [4.9, 10.05, -4.9, -10.1, -10])
    delta = [10, 10, 5 - 2.5, -5, -5]
    close(result["delta_value"], delta)
    spread = np.std(delta, ddof=1) + 1e-6
    close(result["future"], [(x - 2.5) / spread for x in delta])
    total = result["historical"] + result["future"]
    close(result["a_cc"], (total - total.mean()) / (total.std(ddof=1) + 1e-6))
    close(result["a_h"], (result["historical"] + 2.01) / (total.std(ddof=1) + 1e-6))
    assert result["supported"].all() and not result["fallback"].any()


def test_targets_by_hand():
    place = dict(outcome=np.array([8.0, 8.0, 8.0]), step=np.arange(3), length=np.array([3, 3, 3]))
    invalid = np.array([0.0, 1.0, 0.0])
    close(ccpo.return_target(**place, invalid=invalid, gamma=0.5, eta=0.25), [2, 3.75, 8])
    close(ccpo.return_target(**place, invalid=invalid, gamma=0.5, eta=0.25, env_return=np.array([1.0, 2.0, 3.0])), [1, 1.75, 3])
    close(ccpo.outcome_target(**place, gamma=0.5), [1, 2, 4])


def test_rewards_to_go_by_hand():
    """Rows in no order, a copy among them: it counts once."""
    table = dict(traj=[7, 4, 7, 7, 7], step=[2, 0, 0, 1, 2], rewards=[8.0, 1.0, 1.0, 2.0, 8.0])
    close(ccpo.rewards_to_go(**table, gamma=0.5), [8, 1, 4, 6, 8])


def test_value_change_by_hand():
    """Trajectories of three and one steps: past the end the outcome counts, and no discount comes in."""
    table = dict(value=np.array([1.0, 2.0, 4.0, 3.0]), outcome=np.array([9.0, 9, 9, 5]), step=np.array([0, 1, 2, 0]),
                 length=np.array([3, 3, 3, 1]))  # fmt: skip
    for k, expected in ((1, [1, 2, 5, 2]), (2, [3, 7, 5, 2]), (3, [8, 7, 5, 2]), (50, [8, 7, 5, 2])):
        close(ccpo.value_change(**table, k_future=k), expected)
    unknown = ccpo.value_change(**{**table, "value": np.array([1.0, 2, NAN, NAN])}, k_future=2)
    close(unknown, [NAN, 7, NAN, NAN])


def test_future_credit_by_hand():
    task = np.array([1, 1, 0, 1, 0, 2])
    close(ccpo.future_credit(np.array([1.0, 3.0, 5.0, NAN, NAN, NAN]), task=task), [-1 / math.sqrt(2), 1 / math.sqrt(2), 0, 0, 0, 0], 1e-5)
    close(ccpo.future_credit(np.array([0.1 + 0.2, 0.3, 0.0, 0.3, 2e-6, 1.0]), task=task), [0, 0, -0.41421278, 0, 0.41421278, 0], 1e-6)


def test_channels_by_hand():
    """Sums 1, 3 and 8 of a task, the fourth row without support; the other task is tied."""
    h, f = np.array([1.0, 2.0, 6.0, 50.0, 3.0, 4.0]), np.array([0.0, 1.0, 2.0, 50.0, 4.0, 3.0])
    table = dict(historical=h, future=f, task=np.array([1, 1, 1, 1, 0, 0]), supported=np.array([True, True, True, False, True, True]))
    a_h, a_f = ccpo.normalize_channels(**table)
    spread = math.sqrt(13) + 1e-6
    close(a_h, [-2 / spread, -1 / spread, 3 / spread, 0, 0, 0])
    close(a_f, [-1 / spread, 0, 1 / spread, 0, 0, 0])
    close(ccpo.normalize_channels(**table, normalize="none"), [h, f])


@pytest.mark.parametrize("h", [1, 2, 7])
@few
@given(value=st.floats(-10, 10), later=st.floats(-10, 10), gamma=st.floats(0, 1))
def test_the_change_of_value_splits_in_two(h, value, later, gamma):
    gain, nearer = ccpo.split_change(value, later, gamma=gamma, h=h)
    close(gain + nearer, later - value)
    close([gain, nearer], [gamma**h * later - value, later - gamma**h * later])


@few
@given(seeds)
def test_contextual_advantage_is_the_sum_of_its_channels(seed):
    rows, options = random_rows(seed), random_settings(seed)
    result = credit(rows, **options)
    close(result["a_cc"], result["a_h"] + result["a_f"], 0)
    for task in {r["task"] for r in rows}:
        mine = np.array([r["task"] == task for r in rows]) & result["supported"]
        both = result["historical"][mine] + result["future"][mine]
        if options["normalize"] == "none":
            close(result["a_cc"][mine], both, 0)
        else:
            close(result["a_cc"][mine], oracle.zscore(both.tolist()), 1e-8)


@few
@given(seeds)
def test_own_outcome_and_own_penalty_never_move_own_expectations(seed):
    rows, options = random_rows(seed), random_settings(seed) | {"exclude_self": True}
    before, mine = credit(rows, **options), rows[0]["traj"]
    after = credit([dict(r, outcome=r["outcome"] + 5, invalid=not r["invalid"]) if r["traj"] == mine else r for r in rows], **options)
    own = [n for n, r in enumerate(rows) if r["traj"] == mine]
    for name in ("baseline", "value", "tau", "supported"):
        assert np.array_equal(before[name][own], after[name][own], equal_nan=True)
    assert not np.array_equal(before["return_target"][own], after["return_target"][own])


@few
@given(seeds)
def test_nothing_leaks_from_another_task(seed):
    rows, options = random_rows(seed), random_settings(seed)
    mine = rows[0]["task"]
    changed = [r if r["task"] == mine else dict(r, outcome=3 - 2 * r["outcome"], invalid=not r["invalid"]) for r in rows]
    before, after = credit(rows, **options), credit(changed, **options)
    same = [n for n, r in enumerate(rows) if r["task"] == mine]
    for name in before:
        assert np.array_equal(before[name][same], after[name][same], equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_groups_that_share_their_prompts_but_not_the_game_stay_apart(kernel):
    """Same texts, same hidden states, other group: each group's credit is what it has alone."""
    draw = scattered(5)
    memory = {}

    def hidden(i, t):
        return memory.setdefault((i, t), draw(i, t))

    won = game((10.0, "aba"), (10.0, "acb"), (0.0, "ab"), hidden=hidden)
    lost = game((0.0, "aba"), (0.0, "acb", {1}), (0.0, "ab"), hidden=hidden, task=1)
    both, alone = credit(won + lost, kernel=kernel), [credit(g, kernel=kernel) for g in (won, lost)]
    for name in both:
        close(both[name], np.concatenate([a[name] for a in alone]), 1e-8)
    assert (both["value"][len(won) :] == 0).all() and (both["value"][: len(won)] > 1).any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_task_that_always_fails_has_no_future_credit_and_still_penalties(kernel):
    rows = game((0.0, "aba", {1}), (0.0, "abc"), (0.0, "aa", {0}), hidden=scattered())
    result = credit(rows, kernel=kernel)
    for name in ("value", "delta_value", "future", "a_f"):
        assert (result[name] == 0).all()
    assert (result["a_h"] != 0).all() and result["a_cc"][1] == min(result["a_cc"])
    quiet = credit([dict(r, invalid=False) for r in rows], kernel=kernel)
    for name in ("historical", "a_h", "a_cc"):
        assert (quiet[name] == 0).all()


@pytest.mark.parametrize("outcome", [10.0, 0.35, 1e3 / 3])
@pytest.mark.parametrize("kernel", KERNELS)
def test_float_residue_of_a_tied_task_is_exactly_zero(outcome, kernel):
    rows = game((outcome, "abc"), (outcome, "abd"), (outcome, "bcd"), hidden=scattered(1))
    result = credit(rows, kernel=kernel, gamma=1.0)
    assert np.abs(result["historical"]).max() < 1e-9 * outcome  # residue, not credit
    for name in ("future", "a_h", "a_f", "a_cc"):
        assert (result[name] == 0).all()
    for normalize in ("zscore", "center"):
        episode = dict(task=[1] * 9, outcome=[0.1 + 0.2] + [0.3] * 8, invalid=[0] * 9, normalize=normalize)
        assert (ccpo.episode_advantage(**episode) == 0).all()


@few
@given(seeds, st.sampled_from([2.0, -0.5, 1e-3]), st.sampled_from([0.0, 4.0, -1.0]))
def test_history_scales_with_the_returns_and_forgets_their_level(seed, a, b):
    rows, options = random_rows(seed), random_settings(seed) | {"eta": 0.0, "kernel": "cosine"}
    rng = random.Random(seed)
    returns = {(r["traj"], r["step"]): rng.gauss(0, 5) for r in rows}
    y = np.array([returns[r["traj"], r["step"]] for r in rows])
    before, after = (credit(rows, **options, env_return=x)["historical"] for x in (y, a * y + b))
    close(after, a * before)


@few
@given(seeds)
def test_one_step_changes_of_value_add_up_to_outcome_less_first_value(seed):
    rows = random_rows(seed, copies=False)
    result = credit(rows, **(random_settings(seed) | {"k_future": 1, "exclude_self": True}))
    for traj in {r["traj"] for r in rows}:
        mine = [n for n, r in enumerate(rows) if r["traj"] == traj]
        (first,) = (n for n in mine if rows[n]["step"] == 0)
        if result["supported"][first]:
            close(result["delta_value"][mine].sum(), rows[first]["outcome"] - result["value"][first])


@few
@given(seeds)
def test_copies_add_no_peers_and_get_their_steps_credit(seed):
    rows, options = random_rows(seed, copies=False), random_settings(seed)
    rng = random.Random(seed)
    more = [rng.randrange(len(rows)) for _ in range(5)]
    alone, result = credit(rows, **options), credit(rows + [rows[n] for n in more], **options)
    for name in set(result) - {"a_h", "a_f", "a_cc"}:
        close(result[name][: len(rows)], alone[name], 0)
    for name in result:
        close(result[name][len(rows) :], result[name][more], 0)


def test_copies_count_in_the_last_normalisation_alone():
    rows = game((10.0, "ab"), (0.0, "ac"), (0.0, "ab"), hidden=scattered(2))
    result = credit(rows + rows[:1] * 4)
    total = result["historical"] + result["future"]
    close(result["a_cc"], (total - total.mean()) / (total.std(ddof=1) + 1e-6))
    close(np.mean(result["future"][:6]), 0.0)


@pytest.mark.parametrize("normalize", ["task", "none"])
def test_a_single_trajectory_has_no_contextual_credit(normalize):
    """Alone, or the only one of its task; its rows do not enter the others' statistics."""
    lone = game((10.0, "aba", {1}), task=1, hidden=scattered(3))
    for rows in (lone, lone + game((10.0, "ab"), (0.0, "ab"), hidden=scattered(4))):
        result = credit(rows, normalize=normalize)
        for name in ("baseline", "value", "historical", "future", "a_h", "a_f", "a_cc"):
            assert (result[name][:3] == 0).all()
        assert not result["supported"][:3].any() and np.isnan(result["tau"][:3]).all() and np.isnan(result["delta_value"][:3]).all()
        close(result["return_target"][:3], [0.95**2 * 10, 9.5 - 0.1, 10])
    assert (result["a_cc"][3:] != 0).all()
    one = ccpo.contextual_credit(**columns(lone[:1]))
    assert one["a_cc"].tolist() == [0.0]


@few
@given(seeds)
def test_row_order_is_irrelevant_and_inputs_are_not_written(seed):
    rows, options = random_rows(seed), random_settings(seed)
    table = {name: np.array(column) for name, column in columns(rows).items()}
    kept = {name: x.copy() for name, x in table.items()}
    before = ccpo.contextual_credit(**table, **options)
    order = np.random.default_rng(seed).permutation(len(rows))
    after = ccpo.contextual_credit(**{name: x[order] for name, x in table.items()}, **options)
    for name in before:
        close(after[name], before[name][order], 1e-8)
    assert all((table[name] == kept[name]).all() for name in table)


def test_per_row_arguments_may_be_lists_numpy_or_torch():
    case = VECTORS["credit"][0]
    table = columns(case["rows"])
    for convert in (np.array, lambda x: torch.from_numpy(np.array(x))):
        mixed = {name: x if name == "obs" else convert(x) for name, x in table.items()}
        result = ccpo.contextual_credit(**mixed)
        assert all(isinstance(x, np.ndarray) for x in result.values())
        close(result["a_cc"], case["a_cc"])
        assert result["a_cc"].dtype == np.float64 and result["supported"].dtype == result["fallback"].dtype == bool
        close(ccpo.episode_advantage(**{k: mixed[k] for k in ("task", "outcome", "invalid")}), case["a_ep_zscore"])
    half = torch.tensor(table["hidden"]).bfloat16().requires_grad_()
    assert np.isfinite(ccpo.contextual_credit(**{**table, "hidden": half})["a_cc"]).all()


def test_channels_that_are_off_leave_the_other_alone():
    rows = game((10.0, "abc", {1}), (0.0, "aab"), (0.0, "ac"), hidden=scattered(6))
    full = credit(rows, normalize="none")
    for off, kept, gone in (("history_weight", "future", "historical"), ("future_weight", "historical", "future")):
        result = credit(rows, **{off: 0.0})
        assert (result[gone] == 0).all()
        close(result[kept], full[kept], 0)
        close(result["a_cc"], oracle.zscore(full[kept].tolist()))
    none = credit(rows, history_weight=0.0, future_weight=0.0)
    assert (none["a_cc"] == 0).all() and none["supported"].all()
    double = credit(rows, normalize="none", history_weight=2.0, future_weight=0.5)
    close(double["a_cc"], 2 * full["historical"] + 0.5 * full["future"])


def test_episode_advantage_by_hand():
    """Scores 10, 9.9, 0 of one task and 4 of another: rows count, not trajectories."""
    table = dict(task=[3, 3, 8, 3], outcome=[10.0, 10.0, 4.0, 0.0], invalid=[False, True, False, False])
    scores = np.array([10, 9.9, 0])
    close(ccpo.episode_advantage(**table, normalize="center"), [10 - 6.63333333333, 9.9 - 6.63333333333, 0, -6.63333333333])
    z = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    close(ccpo.episode_advantage(**table), [z[0], z[1], 0, z[2]])
    with pytest.raises(AssertionError):
        ccpo.episode_advantage(**table, normalize="task")


def test_work_grows_with_the_squares_of_the_buckets(monkeypatch):
    """Distances are taken within buckets, and within a task only where someone has no peers in its own."""
    sizes, plain = [], ccpo._distances
    monkeypatch.setattr(ccpo, "_distances", lambda x: sizes.append(len(x)) or plain(x))
    rng = random.Random(0)
    rows = [r for task in range(6) for r in game(*((10.0 * (i % 2), "abcd" * 3) for i in range(4)), task=task, hidden=scattered(task))]
    rows += game((0.0, "axa"), (10.0, "aya"), task=6, hidden=scattered(6))
    rng.shuffle(rows)
    credit([dict(r, hidden=r["hidden"][:8]) for r in rows])
    assert sorted(sizes) == sorted([4 * 3] * 4 * 6 + [4, 6])


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "change,what",
    [
        (dict(obs="z"), "disagree on obs"),
        (dict(outcome=3.0), "disagree on outcome"),
        (dict(invalid=True), "disagree on invalid"),
        (dict(task=5), "disagree on task"),
        (dict(hidden=[9.0] * 8), "disagree on hidden"),
    ],
)
def test_copies_of_a_step_have_to_agree(change, what):
    rows = game((10.0, "ab"), (0.0, "ac"), hidden=scattered())
    with pytest.raises(ValueError, match=rf"task {change.get('task', 0)}, trajectory 1, step 1: .*{what}"):
        credit([*rows, dict(rows[3], **change)])
    with pytest.raises(ValueError, match="task 0, trajectory 1, step 1: copies of this step disagree on env_return"):
        credit([*rows, rows[3]], env_return=[1.0, 2, 3, 4, 5])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_numbers_that_are_not_finite_are_refused(bad):
    rows = game((10.0, "ab"), (0.0, "ac"), task=4, hidden=scattered())
    rows[2] = dict(rows[2], hidden=[*rows[2]["hidden"][:-1], bad])
    with pytest.raises(ValueError, match="task 4, trajectory 41, step 0: hidden is not finite"):
        credit(rows)
    rows[2] = dict(rows[1], outcome=bad)
    with pytest.raises(ValueError, match="task 4, trajectory 40, step 1: outcome is not finite"):
        credit(rows)


def test_outcome_and_task_are_those_of_the_trajectory():
    rows = game((10.0, "ab"), (0.0, "ac"), hidden=scattered())
    with pytest.raises(ValueError, match="task 0, trajectory 1, step 1: outcome is not that of"):
        credit(rows[:3] + [dict(rows[3], outcome=10.0)])
    with pytest.raises(ValueError, match="task 7, trajectory 0, step 1: task is not that of"):
        credit([rows[0], dict(rows[1], task=7), *rows[2:]])


def test_steps_must_be_whole_and_columns_equally_long():
    rows = game((10.0, "abc"), (0.0, "ac"), hidden=scattered())
    with pytest.raises(ValueError, match="task 0, trajectory 0, step 2: .*missing"):
        credit(rows[:1] + rows[2:])
    with pytest.raises(ValueError, match="task 0, trajectory 1, step 1: .*missing"):
        credit(rows[:3] + rows[4:])
    table = columns(rows)
    with pytest.raises(AssertionError):
        ccpo.contextual_credit(**{**table, "obs": table["obs"] + ["d"]})
    with pytest.raises(AssertionError):
        ccpo.contextual_credit(**{**table, "hidden": [1.0] * 5})
    for name in ("kernel", "normalize"):
        with pytest.raises(AssertionError):
            credit(rows, **{name: "other"})


# ------------------------------------------------------------------------------------------------- clip and loss


def test_dual_clip_by_hand():
    z = t64([math.log(w) for w in (0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 10.0)]).requires_grad_()
    loss = ccpo.dual_clip_loss(z, t64([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]))
    close(loss.detach(), [-0.5, -1.0, -1.2, 0.8, 1.0, 2.0, 3.0])
    loss.sum().backward()
    close(z.grad, [-0.5, -1.0, 0.0, 0.0, 1.0, 2.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(dtype):
    x = t64([100.0, -100.0]).to(dtype).requires_grad_()
    for a in (1.0, -1.0):
        loss = ccpo.dual_clip_loss(x, torch.full((2,), a, dtype=dtype))
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    unclipped = ccpo.dual_clip_loss(x.detach(), torch.full((2,), -1.0, dtype=dtype), eps=0.2, c=1e12)
    assert float(unclipped[0]) == pytest.approx(math.exp(20), rel=1e-5)
    penalty = ccpo.kl_penalty(x, torch.zeros(2, dtype=dtype))
    penalty.sum().backward()
    assert penalty.tolist() == [10.0, 10.0] and torch.isfinite(x.grad).all()


@few
@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=8))
def test_kl_by_its_formula(pairs):
    logp, ref = t64([p[0] for p in pairs]), t64([p[1] for p in pairs])
    close(ccpo.kl_penalty(logp, ref), [min(math.exp(r - x) - (r - x) - 1, 10.0) for x, r in pairs])
    assert (ccpo.kl_penalty(logp, ref) >= 0).all() and (ccpo.kl_penalty(logp, logp) == 0).all()


def test_kl_pulls_towards_the_reference():
    logp = t64([-1.0, -3.0]).requires_grad_()
    ccpo.kl_penalty(logp, t64([-2.0, -2.0])).sum().backward()
    close(logp.grad, [1 - math.exp(-1), 1 - math.exp(1)])


def minibatch(n, seed=0):
    """A mini-batch of n rows, the third without any token; masked cells hold NaN."""
    rng, _, out, batch = splits.token_columns(n, seed)
    for name in ("adv", "adv_history", "adv_future", "adv_context", "adv_episode"):
        batch[name] = t64([[rng.gauss(0, 1)] for _ in range(n)])
    batch["fallback"] = t64([[float(rng.random() < 0.5)] for _ in range(n)])
    return out, batch


def run_loss(out, batch, cfg, chunks):
    return splits.run_loss(ccpo, out, batch, cfg, chunks, wrt=("logp", "entropy"))


def plain_loss(out, batch, cfg):
    """The loss and its gradients, token by token, through autograd of scalars."""
    logp, entropy = out["logp"].clone().requires_grad_(), out["entropy"].clone().requires_grad_()
    terms, tokens = [], 0
    for n, i in batch["mask"].nonzero().tolist():
        rho, a = torch.exp(logp[n, i] - batch["logp_old"][n, i]), float(batch["adv"][n, 0])
        size = float(rho.detach())
        if a >= 0:
            gain = rho * a if size <= 1 + cfg.eps else (1 + cfg.eps) * a
        else:
            gain = cfg.dual_clip * a if size >= cfg.dual_clip else rho * a if size >= 1 - cfg.eps else (1 - cfg.eps) * a
        l = batch["logp_ref"][n, i] - logp[n, i]
        terms.append(-gain + cfg.kl_coef * (torch.exp(l) - l - 1) - cfg.entropy_coef * entropy[n, i])
        tokens += 1
    total = sum(terms) / tokens
    return total.detach(), torch.autograd.grad(total, (logp, entropy))


def test_defaults_are_the_papers():
    cfg = ccpo.Config()
    assert (cfg.gamma, cfg.eta, cfg.k_future, cfg.kernel, cfg.exclude_self) == (0.95, 0.1, 2, "exp", True)
    assert (cfg.summary_weight, cfg.history_weight, cfg.future_weight) == (1.0, 1.0, 1.0)
    assert (cfg.normalize, cfg.alpha_ep, cfg.normalize_ep) == ("task", 0.0, "zscore")
    assert (cfg.eps, cfg.dual_clip, cfg.kl_coef, cfg.entropy_coef, cfg.clip_width) == (0.2, 3.0, 0.01, 0.001, 0.2)
    assert set(ccpo.NEEDS) == {"reference", "hidden", "groups"}


def test_presets_are_the_papers():
    alfworld, shop = (ccpo.PRESETS["paper"][env] for env in ("alfworld", "webshop"))
    for preset in (alfworld, shop):
        assert (preset["tasks"], preset["rollouts"], preset["lr"], preset["iterations"], preset["passes"]) == (16, 8, 1e-6, 150, 1)
        assert (preset["style"], preset["success_reward"], preset["history_length"]) == ("think_action", 10.0, 2)
        assert (preset["temperature"], preset["eval_temperature"], preset["response_tokens"]) == (1.0, 0.4, 512)
        assert "invalid_reward" not in preset  # eta is the only penalty
    assert (alfworld["minibatch"], alfworld["max_steps"], alfworld["prompt_tokens"]) == (256, 50, 2048)
    assert (shop["minibatch"], shop["max_steps"], shop["prompt_tokens"]) == (64, 15, 4096)
    assert (shop["normalize"], shop["normalize_ep"]) == ("none", "center") and "normalize" not in alfworld
    fields = {f.name for f in dataclasses.fields(ccpo.Config)}
    for preset in (alfworld, shop, *ccpo.PRESETS["mini"].values()):
        ccpo.Config(**{name: x for name, x in preset.items() if name in fields})


@pytest.mark.parametrize(
    "name,bad,good",
    [("gamma", 1.1, 1.0), ("alpha_ep", -0.1, 1.0), ("eps", -0.1, 2.0), ("k_future", 0, 1), ("dual_clip", 0.9, 1.0), ("eta", -1.0, 0.0),
     ("summary_weight", -1.0, 0.0), ("history_weight", -0.5, 0.0), ("future_weight", NAN, 0.0), ("kl_coef", -0.1, 0.0),
     ("entropy_coef", -0.1, 0.0)],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused_by_name(name, bad, good):
    with pytest.raises(ValueError, match=f"^{name} {bad}: give"):
        ccpo.Config(**{name: bad})
    ccpo.Config(**{name: good})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kl,entropy", [(0.01, 0.001), (0.0, 0.02), (0.3, 0.0)])
def test_loss_equals_the_plain_formula(seed, kl, entropy):
    out, batch = minibatch(9, seed)
    cfg = ccpo.Config(kl_coef=kl, entropy_coef=entropy, eps=0.1, dual_clip=1.5)
    total, grads, _ = run_loss(out, batch, cfg, [slice(None)])
    expected, expected_grads = plain_loss(out, batch, cfg)
    close(total, expected)
    for grad, right in zip(grads, expected_grads):
        close(grad[batch["mask"]], right[batch["mask"]])
        assert (grad[~batch["mask"]] == 0).all()


@pytest.mark.parametrize("n", [7, 9])
def test_loss_does_not_depend_on_the_split(n):
    splits.check_splits(ccpo, *minibatch(n, seed=n), ccpo.Config(kl_coef=0.1, entropy_coef=0.02), wrt=("logp", "entropy"))


@pytest.mark.parametrize("fill", [NAN, INF, -INF, 1e30])
def test_masked_cells_never_matter(fill):
    out, batch = minibatch(7, seed=1)
    clean, _, _ = run_loss(out, batch, ccpo.Config(), [slice(None)])
    mask = batch["mask"]
    dirty = {k: torch.where(mask, v, fill) for k, v in (out | batch).items() if v.shape == mask.shape and k != "mask"}
    dirty_batch = {k: dirty.get(k, v) for k, v in batch.items()}
    total, grads, _ = run_loss({k: dirty[k] for k in out}, dirty_batch, ccpo.Config(), [slice(None)])
    assert float(total) == float(clean) and all(torch.isfinite(g).all() and (g[~mask] == 0).all() for g in grads)


def test_mean_of_means_is_not_taken():
    """10 tokens of loss 1 and 2 tokens of loss 7: 2.0, not 4.0."""
    cfg = ccpo.Config(kl_coef=0.0, entropy_coef=0.0)
    mask = torch.arange(10) < torch.tensor([[10], [2]])
    logp = torch.where(mask, t64(-1.0), NAN)
    batch = dict(logp_old=logp, mask=mask, adv=t64([[-1.0], [-7.0]]))  # and kl_coef=0 needs no reference
    for chunks in ([slice(None)], [slice(0, 1), slice(1, 2)]):
        close(run_loss(dict(logp=logp, entropy=logp), batch, cfg, chunks)[0], 2.0)


def test_a_minibatch_without_any_token_has_loss_zero():
    out, batch = minibatch(3)
    batch["mask"] = torch.zeros_like(batch["mask"])
    total, grads, _ = run_loss(out, batch, ccpo.Config(), [slice(None)])
    assert float(total) == 0.0 and all((g == 0).all() for g in grads)


def test_denominators_count_tokens():
    _, batch = minibatch(6)
    tokens = int(batch["mask"].sum())
    assert {k: int(v) for k, v in ccpo.denominators(batch, ccpo.Config()).items()} == dict(policy=tokens, kl=tokens)


def test_metrics_say_what_happened():
    out, batch = minibatch(9, seed=3)
    cfg, mask = ccpo.Config(), batch["mask"]
    first = mask[0].nonzero()[0, 0]
    batch["adv"][0], out["logp"][0, first] = -1.0, batch["logp_old"][0, first] + 2.0  # the dual clip acts here
    z, adv = (out["logp"] - batch["logp_old"])[mask].tolist(), batch["adv"].expand_as(mask)[mask].tolist()
    _, _, (names,) = run_loss(out, batch, cfg, [slice(None)])
    mean = {k: float(a) / float(b) for k, (a, b) in names.items() if b is not None}
    w = [math.exp(x) for x in z]
    close(mean["policy/ratio"], sum(w) / len(w))
    close(float(names["policy/ratio/max"][0]), max(w))
    close(mean["policy/loss"], sum(oracle.dual_clip_loss(x, a) for x, a in zip(z, adv)) / len(w))
    acts = sum(oracle.clip(x, 0.8, 1.2) * a < x * a for x, a in zip(w, adv))
    dual = sum(x > 3 and a < 0 for x, a in zip(w, adv))
    assert int(names["policy/clip_frac"][0]) == acts > 0 and int(names["policy/dual_clip_frac"][0]) == dual > 0
    close(mean["policy/entropy"], float(out["entropy"][mask].mean()))
    close(mean["policy/kl"], float(ccpo.kl_penalty(out["logp"], batch["logp_ref"])[mask].mean()))
    real = mask.any(1)
    for name in ("history", "future", "context", "episode"):
        close(mean[f"credit/{name}"], float(batch[f"adv_{name}"][real].abs().mean()))
    close(mean["credit/fallback"], float(batch["fallback"][real].mean()))
    bare = {k: batch[k] for k in ("mask", "logp_old", "logp_ref", "adv")}  # the record of the credit may be missing
    assert not [k for k in run_loss(out, bare, cfg, [slice(None)])[2][0] if k.startswith("credit")]


def test_loss_is_small_in_value_but_not_in_gradient_at_unchanged_weights():
    """Rows of one length and advantages of mean zero: the value says nothing about the step that follows."""
    logp, mask = torch.full((4, 3), -1.0, dtype=torch.float64), torch.ones(4, 3, dtype=torch.bool)
    adv = t64(oracle.zscore([0.0, 2.0, 0.0, 3.0]))[:, None]
    batch = dict(logp_old=logp, logp_ref=logp, mask=mask, adv=adv)
    total, (grad, _), (names,) = run_loss(dict(logp=logp, entropy=logp * 0), batch, ccpo.Config(), [slice(None)])
    assert abs(float(total)) < 1e-12 and float(names["policy/ratio/max"][0]) == 1.0
    close(grad, -adv.expand(4, 3) / 12)


# ------------------------------------------------------------------------------------------------- what the loop calls


def iteration(seed=0):
    """The global batch of an iteration, as the trainer makes it: each row once, rewards at the end of a trajectory."""
    rows = random_rows(seed, tasks=3, trajectories=4, copies=False)
    table = columns(rows)
    last = {}
    for r in rows:
        last[r["traj"]] = max(last.get(r["traj"], 0), r["step"])
    width = torch.tensor([random.Random(n).randint(1, 5) for n in range(len(rows))])
    reward = [r["outcome"] * (r["step"] == last[r["traj"]]) for r in rows]
    batch = dict(group=table.pop("task"), reward=reward, mask=torch.arange(5) < width[:, None], info=[{}] * len(rows))
    return batch | table | dict(hidden=t64(table["hidden"]), truncated=[False] * len(rows)), rows


@pytest.mark.parametrize("seed", range(8))
def test_advantages_are_both_credits_together(seed):
    batch, rows = iteration(seed)
    shared = {name: column for name, column in columns(rows).items() if name in ("task", "outcome", "invalid")}
    for alpha, *kinds in ((0.0, "task", "zscore"), (1.0, "task", "zscore"), (1.0, "none", "center"), (0.5, "none", "zscore")):
        normalize, normalize_ep = kinds
        cfg = ccpo.Config(alpha_ep=alpha, normalize=normalize, normalize_ep=normalize_ep)
        result = ccpo.advantages(batch, cfg)
        expected = oracle.contextual_credit(**columns(rows), normalize=normalize)
        episode = oracle.episode_advantage(**shared, normalize=normalize_ep)
        close(result["adv"][:, 0], np.array(expected["a_cc"]) + alpha * np.array(episode), 1e-5)
        for name, right in (("history", expected["a_h"]), ("future", expected["a_f"]), ("context", expected["a_cc"]), ("episode", episode)):
            close(result[f"adv_{name}"][:, 0], right, 1e-5)
        close(result["fallback"][:, 0], expected["fallback"])
        assert all(x.shape == (len(rows), 1) and x.dtype == torch.float32 for x in result.values())


@pytest.mark.parametrize(
    "change",
    [dict(gamma=0.5), dict(eta=2.0), dict(k_future=1), dict(kernel="uniform"), dict(kernel="cosine"), dict(exclude_self=False),
     dict(summary_weight=0.0), dict(history_weight=0.0), dict(future_weight=0.0), dict(normalize="none"), dict(alpha_ep=1.0)],
)  # fmt: skip
def test_every_switch_reaches_the_credit(change):
    rows = game((10.0, "abcb", {1}), (0.0, "abca"), (10.0, "acb", {0}), hidden=scattered(8))
    table = columns(rows)
    batch = dict(table, group=table["task"], hidden=t64(table["hidden"]), reward=[10.0 * (n in (3, 10)) for n in range(11)])
    default, changed = (ccpo.advantages(batch, ccpo.Config(**options))["adv"] for options in ({}, change))
    assert float((default - changed).abs().max()) > 1e-3
    options = dict(change)
    if options.pop("alpha_ep", 0):
        changed = changed - t64(oracle.episode_advantage(**{k: table[k] for k in ("task", "outcome", "invalid")}))[:, None]
    close(changed[:, 0], oracle.contextual_credit(**table, **options)["a_cc"], 1e-5)


def test_the_penalty_enters_the_episode_score_too():
    table = columns(game((10.0, "ab", {1}), (0.0, "ac"), hidden=scattered()))
    batch = dict(table, group=table["task"], hidden=t64(table["hidden"]), reward=[0.0, 10, 0, 0])
    result = ccpo.advantages(batch, ccpo.Config(eta=4.0, normalize_ep="center"))
    close(result["adv_episode"][:, 0], [6, 2, -4, -4], 1e-6)


def test_rewards_on_the_way_count_where_they_fall():
    """Rewards of 2 at the first step and 8 at the last: Y sees when they came, the outcome target their sum."""
    rows = game((10.0, "abc"), (0.0, "abc"), hidden=scattered(1))
    table = columns(rows)
    batch = dict(table, group=table["task"], hidden=t64(table["hidden"]), reward=[2.0, 0, 8.0, 0, 0, 0])
    result = ccpo.advantages(batch, ccpo.Config(normalize="none", gamma=0.5, future_weight=0.0))
    close(result["adv_history"][:3, 0], [2 + 2, 4, 8], 1e-6)
    disagreeing = dict(batch, reward=[2.0, 0, 8.0, 0, 0, 0, 7.0])
    for name in ("group", "traj", "step", "obs", "outcome", "invalid"):
        disagreeing[name] = batch[name] + batch[name][:1]
    disagreeing["hidden"] = torch.cat([batch["hidden"], batch["hidden"][:1]])
    with pytest.raises(ValueError, match="task 0, trajectory 0, step 0: copies of this step disagree on env_return"):
        ccpo.advantages(disagreeing, ccpo.Config())


def test_equal_prompts_share_their_hidden_state_before_the_credit():
    batch, rows = iteration(3)
    prompts = [[r["task"]] if r["step"] == 0 else [r["traj"], r["step"]] for r in rows]
    noise = 1e-7 * torch.randn(batch["hidden"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = columns(rows)
    hidden = ccpo.shared_hidden(table["hidden"], prompts, traj=table["traj"], step=table["step"])
    expected = ccpo.advantages(dict(batch, hidden=t64(hidden)), ccpo.Config())["adv"]
    noisy = dict(batch, hidden=t64(hidden) + noise, prompt_ids=[np.array(p, np.int32) for p in prompts])
    close(ccpo.advantages(noisy, ccpo.Config())["adv"], expected, 1e-4)
    noisy.pop("prompt_ids")
    assert float((ccpo.advantages(noisy, ccpo.Config())["adv"] - expected).abs().max()) > 1e-2


def test_credit_lands_on_the_tokens_of_its_step_alone():
    """The advantage of a row moves that row's log-probs and no other."""
    out, batch = minibatch(6, seed=2)
    cfg = ccpo.Config(kl_coef=0.0, entropy_coef=0.0, eps=1.0, dual_clip=1e9)
    for n in (0, 1, 5):
        adv = torch.zeros_like(batch["adv"])
        adv[n] = 1.0
        _, (grad, _), _ = run_loss(dict(out, logp=batch["logp_old"]), dict(batch, adv=adv), cfg, [slice(None)])
        assert torch.equal(grad != 0, batch["mask"] & (torch.arange(6) == n)[:, None])


def test_worked_example_shows_what_the_code_computes(capsys):
    ccpo.example()
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line[:9].strip().replace(" ", "").isdigit()]
    assert len(rows) == 6 and sum("fallback" in row for row in rows) == 2 and "nan" not in printed
    y = [float(row.split("|")[2].split()[0]) for row in rows]
    close(y, [2.5, 5, 10, -0.1, 0, 0])
    tau = 0.15 * math.sqrt(2 - 16 / math.sqrt(108))
    weights = [math.exp(-math.sqrt(2 - x) / tau) for x in (12 / math.sqrt(84), 14 / math.sqrt(63))]
    close(float(rows[4].split("|")[2].split()[1]), (weights[0] * 2.5 + weights[1] * 10) / sum(weights), 1e-3)
