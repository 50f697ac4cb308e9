"""CAPO-action against given numbers, against slow loops written apart, and against the properties of its equations."""

import json
import math
import random
from pathlib import Path

import numpy as np
import oracle_capo_action as oracle
import pytest
import splits
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import capo_action as capo

VECTORS = json.loads((Path(__file__).parent / "vectors" / "capo_action.json").read_text())
KINDS = ("action", "sqrt", "mean", "product")
NAN, INF = math.nan, math.inf
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)

log_ratios = st.floats(-0.3, 0.3).map(lambda x: round(x, 6))
rows_of_tokens = st.lists(st.lists(log_ratios, min_size=1, max_size=9), min_size=1, max_size=7)


# ------------------------------------------------------------------------------------------------- helpers


def t64(x):
    return torch.as_tensor(x, dtype=torch.float64)


def pad(rows, rng=None, fill=NAN, width=None):
    """Ragged rows -> ((N, L) float64, (N, L) bool). With rng, the tokens of a row sit anywhere, in order, gaps filled."""
    width = width or max([len(row) for row in rows] + [1]) + (rng.randint(0, 3) if rng else 0)
    x, mask = torch.full((len(rows), width), fill, dtype=torch.float64), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        places = sorted(rng.sample(range(width), len(row))) if rng else list(range(len(row)))
        for k, value in zip(places, row):
            x[i, k], mask[i, k] = value, True
    return x, mask


def unpad(x, mask):
    return [x[i][mask[i]].tolist() for i in range(len(x))]


def close(actual, expected, tol=1e-9):
    actual, expected = t64(actual), t64(expected)
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    assert torch.allclose(actual, expected, rtol=tol, atol=tol), f"{actual}\n{expected}"


def close_rows(x, mask, rows, tol=1e-9):
    """x agrees with ragged rows under the mask and is exactly 0 elsewhere."""
    for i, row in enumerate(rows):
        close(x[i][mask[i]], row, tol)
    assert (x[~mask] == 0).all()


def mean_of_batch(z, mask):
    total, count = capo.center(z, mask)
    return total / max(float(count), 1.0)


def ragged(rng, n, scale, empty=True):
    return [[rng.gauss(0, scale) for _ in range(rng.randint(0 if empty else 1, 10))] for _ in range(n)]


def shuffled_steps(rng, trajectories=4, longest=5):
    """(traj, step) of some trajectories, rows in random order; ids that are no positions."""
    keys = [(100 + 7 * i, s) for i in range(rng.randint(1, trajectories)) for s in range(rng.randint(1, longest))]
    rng.shuffle(keys)
    return [k[0] for k in keys], [k[1] for k in keys]


def weights(rows, **kwargs):
    """The action ratios of ragged rows with the mean of this batch."""
    z, mask = pad(rows)
    return capo.action_ratio(z, mask, mu=mean_of_batch(z, mask), **kwargs)


# ------------------------------------------------------------------------------------------------- given numbers


@pytest.mark.parametrize("case", VECTORS["gae"])
def test_vectors_gae(case):
    args = {k: case[k] for k in ("traj", "step", "gamma", "lam")}
    adv, ret = capo.action_gae(rewards=t64(case["rewards"]), values=t64(case["values"]), **args)
    close(adv, case["advantages"])
    close(ret, case["returns"])
    close(capo.whiten(adv), case["whitened"])
    bootstrap = {int(k): v for k, v in case["bootstrap"].items()}
    adv, ret = capo.action_gae(rewards=t64(case["rewards"]), values=t64(case["values"]), bootstrap=bootstrap, **args)
    close(adv, case["advantages_bootstrap"])
    close(ret, case["returns_bootstrap"])


@pytest.mark.parametrize("case", VECTORS["ratio"])
def test_vectors_ratio(case):
    z, mask = pad(case["z"])
    mu = mean_of_batch(z, mask)
    close(mu, case["mu"])
    for kind in KINDS:
        close(capo.action_ratio(z, mask, mu=mu, kind=kind), case[kind])
    close(capo.action_ratio(z, mask, mu=mu), case["action"])
    close(capo.action_ratio(z, mask, mu=mu, alpha=0.0), case["alpha0"])
    close(capo.action_ratio(z, mask, mu=mu, alpha=1.0), case["alpha1"])


@pytest.mark.parametrize("case", VECTORS["loss"])
def test_vectors_loss(case):
    z, mask = pad(case["z"])
    z.requires_grad_()
    mu = mean_of_batch(z, mask)
    loss, active = capo.policy_loss(z, mask, t64(case["advantages"]), mu=mu, eps=case["eps"])
    close(loss.detach(), case["per_action_loss"])
    assert active.dtype == torch.bool and active.tolist() == case["clip_active"]
    close(loss.mean().detach(), case["mean_loss"])
    loss.mean().backward()
    close_rows(z.grad, mask, case["grad_z"])


@pytest.mark.parametrize("case", VECTORS["value_loss"])
def test_vectors_value_loss(case):
    v, old, ret = (t64(case[k]) for k in ("values", "values_old", "returns"))
    close(capo.value_loss(v, old, ret, clip=case["clip"]), case["per_row"])
    close(capo.value_loss(v, old, ret), case["per_row"])  # 0.5 is the default


@pytest.mark.parametrize("case", VECTORS["kl"])
def test_vectors_kl(case):
    close(capo.kl_penalty(t64(case["logp"]), t64(case["logp_ref"])), case["per_token"])


# ------------------------------------------------------------------------------------------------- the slow loops


@pytest.mark.parametrize("block", range(4))
def test_oracle_credit(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        traj, step = shuffled_steps(rng)
        n = len(traj)
        rewards, values = [rng.gauss(0, 2) for _ in range(n)], [rng.gauss(0, 2) for _ in range(n)]
        gamma, lam = rng.choice([(0.99, 1.0), (0.9, 0.7), (1.0, 1.0), (0.5, 0.0), (rng.random(), rng.random())])
        bootstrap = {name: rng.gauss(0, 2) for name in set(traj) if rng.random() < 0.5} if seed % 2 else None
        kwargs = dict(rewards=t64(rewards), values=t64(values), traj=traj, step=step, gamma=gamma, lam=lam)
        adv, ret = capo.action_gae(bootstrap=bootstrap, **kwargs)
        expected = oracle.gae(rewards, values, traj, step, gamma, lam, bootstrap)
        close(adv, expected[0])
        close(ret, expected[1])
        close(capo.whiten(adv), oracle.whiten(expected[0]))

        v_rows = ragged(rng, n, 2.0)
        rewards = [r if row else 0.0 for r, row in zip(rewards, v_rows)]
        v, mask = pad(v_rows, rng)
        expected = oracle.token_gae(rewards, v_rows, traj, step, gamma, lam, bootstrap)
        kwargs.update(rewards=t64(rewards), values=v.requires_grad_(), mask=mask)
        adv, ret = capo.token_gae(bootstrap=bootstrap, **kwargs)
        assert not ret.requires_grad, "a target that moves with the critic"
        close_rows(adv, mask, expected[0])
        close_rows(ret, mask, expected[1])


@pytest.mark.parametrize("block", range(4))
def test_oracle_policy(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        rows = ragged(rng, rng.randint(1, 8), rng.choice([1e-3, 0.05, 1.0, 15.0]))
        adv = [rng.choice([rng.gauss(0, 1), rng.gauss(0, 1), 0.0]) for _ in rows]
        z, mask = pad(rows, rng, fill=rng.choice([NAN, INF, -INF, 1e30, 0.0]))
        z.requires_grad_()
        mu = oracle.center(rows)
        close(mean_of_batch(z, mask), mu)
        eps, alpha = rng.choice([1e-3, 0.02, 0.2]), rng.choice([0.5, 0.0, 1.0, rng.random()])
        for kind in KINDS:
            expected = oracle.policy(rows, adv, mu, eps, alpha, kind)
            full = [i for i, row in enumerate(rows) if row]
            w = capo.action_ratio(z, mask, mu=mu, alpha=alpha, kind=kind).detach()
            assert w.shape == (len(rows),)
            close(w[full], [oracle.ratio(rows[i], mu, alpha, kind) for i in full])
            loss, active = capo.policy_loss(z, mask, t64(adv), mu=mu, eps=eps, alpha=alpha, kind=kind)
            close(loss.detach(), expected[0])
            assert active.tolist() == expected[1]
            (grad,) = torch.autograd.grad(loss.sum(), z)
            close_rows(grad, mask, expected[2])


@pytest.mark.parametrize("block", range(4))
def test_oracle_per_token_terms(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        shape = rng.randint(1, 5), rng.randint(1, 6)

        def draw(scale, rng=rng, shape=shape):
            return t64([[rng.gauss(0, scale) for _ in range(shape[1])] for _ in range(shape[0])]).requires_grad_()

        scale = rng.choice([0.05, 0.5, 3.0, 30.0])
        z, a = draw(scale), draw(1.0).detach()
        eps, c = rng.choice([(0.2, 3.0), (0.1, 1.5), (0.3, 5.0)])
        loss = capo.token_loss(z, a, eps=eps, c=c)
        expected = [oracle.token(x, y, eps, c) for x, y in zip(z.flatten().tolist(), a.flatten().tolist())]
        close(loss.detach().flatten(), [e[0] for e in expected])
        close(torch.autograd.grad(loss.sum(), z)[0].flatten(), [e[1] for e in expected])
        close(capo.token_loss(z, a).flatten()[:1].detach(), [oracle.token(float(z[0, 0].detach()), float(a[0, 0]))[0]])

        v, old, ret = (draw(1.0)[:, 0].detach().requires_grad_() for _ in range(3))
        width = rng.choice([0.5, 0.2])
        loss = capo.value_loss(v, old.detach(), ret.detach(), clip=width)
        expected = [oracle.value(*x, width) for x in zip(v.tolist(), old.tolist(), ret.tolist())]
        close(loss.detach(), [e[0] for e in expected])
        close(torch.autograd.grad(loss.sum(), v)[0], [e[1] for e in expected])

        logp, ref = draw(scale), draw(scale).detach()
        loss = capo.kl_penalty(logp, ref)
        expected = [oracle.kl(x, y) for x, y in zip(logp.flatten().tolist(), ref.flatten().tolist())]
        close(loss.detach().flatten(), [e[0] for e in expected])
        close(torch.autograd.grad(loss.sum(), logp)[0].flatten(), [e[1] for e in expected])


# ------------------------------------------------------------------------------------------------- credit


def test_gae_by_hand():
    """Two steps, reward 1 at the end, values 0.5 and 0.25, gamma 0.9, lam 0.5."""
    kwargs = dict(rewards=t64([0.0, 1.0]), values=t64([0.5, 0.25]), traj=[3, 3], step=[0, 1], gamma=0.9, lam=0.5)
    adv, ret = capo.action_gae(**kwargs)
    close(adv, [0.9 * 0.25 - 0.5 + 0.45 * 0.75, 0.75])
    close(ret, [0.9 * 0.25 + 0.45 * 0.75, 1.0])
    adv, _ = capo.action_gae(bootstrap={3: 2.0}, **kwargs)
    close(adv[1], 1.0 + 0.9 * 2.0 - 0.25)


@few
@given(st.integers(0, 10**6))
def test_lam_one_gives_discounted_rewards_to_go_and_lam_zero_the_deltas(seed):
    rng = random.Random(seed)
    traj, step = shuffled_steps(rng)
    rewards, values = [rng.gauss(0, 1) for _ in traj], [rng.gauss(0, 1) for _ in traj]
    kwargs = dict(rewards=t64(rewards), values=t64(values), traj=traj, step=step, gamma=0.9)
    togo = [
        sum(0.9 ** (step[j] - s) * rewards[j] for j in range(len(traj)) if traj[j] == t and step[j] >= s)
        for t, s in zip(traj, step)
    ]
    adv, ret = capo.action_gae(lam=1.0, **kwargs)
    close(ret, togo)
    close(adv, t64(togo) - t64(values))
    after = {(t, s): v for t, s, v in zip(traj, step, values)}
    _, ret = capo.action_gae(lam=0.0, **kwargs)
    close(ret, [r + 0.9 * after.get((t, s + 1), 0.0) for r, t, s in zip(rewards, traj, step)])


@few
@given(st.integers(0, 10**6))
def test_row_order_is_irrelevant_and_no_credit_leaves_a_trajectory(seed):
    rng = random.Random(seed)
    traj, step = shuffled_steps(rng)
    rewards, values = t64([rng.gauss(0, 1) for _ in traj]), t64([rng.gauss(0, 1) for _ in traj])
    bootstrap = {traj[0]: 1.5}
    more = dict(gamma=0.95, lam=0.8, bootstrap=bootstrap)
    adv, ret = capo.action_gae(rewards=rewards, values=values, traj=traj, step=step, **more)
    order = list(range(len(traj)))
    rng.shuffle(order)
    again = capo.action_gae(rewards=rewards[order], values=values[order], traj=[traj[i] for i in order],
                            step=[step[i] for i in order], **more)  # fmt: skip
    close(again[0], adv[order])
    close(again[1], ret[order])
    other = torch.tensor([t != traj[0] for t in traj])
    changed, _ = capo.action_gae(rewards=rewards + 9.0 * ~other, values=values - 5.0 * ~other, traj=traj, step=step,
                                 gamma=0.95, lam=0.8, bootstrap={traj[0]: -70.0})  # fmt: skip
    assert torch.equal(changed[other], adv[other])  # nothing leaks into another episode


@pytest.mark.parametrize("convert", [list, np.array, t64])
def test_per_row_arguments_may_be_lists_numpy_or_torch(convert):
    case = VECTORS["gae"][0]
    ints = (lambda x: torch.tensor(x)) if convert is t64 else convert
    kwargs = dict(traj=ints(case["traj"]), step=ints(case["step"]), gamma=case["gamma"], lam=case["lam"])
    adv, ret = capo.action_gae(rewards=convert(case["rewards"]), values=convert(case["values"]), **kwargs)
    close(adv, case["advantages"])
    close(ret, case["returns"])
    close(capo.whiten(convert(case["advantages"])), case["whitened"])
    bootstrap = {int(k): v for k, v in case["bootstrap"].items()}
    adv, _ = capo.action_gae(rewards=convert(case["rewards"]), values=convert(case["values"]), bootstrap=bootstrap,
                             **kwargs)  # fmt: skip
    close(adv, case["advantages_bootstrap"])


def test_whitening_uses_the_sample_deviation_and_each_row_once():
    close(capo.whiten(t64([1.0, 3.0])), [-1 / math.sqrt(2), 1 / math.sqrt(2)], 1e-7)
    x = capo.whiten(t64([0.2, -1.0, 3.0, 7.0, 7.0]))
    assert abs(float(x.mean())) < 1e-12 and abs(float(x.std()) - 1) < 1e-7
    small = [1e-8, 3e-8]  # small, and still no tie: the floor of 1e-8 is added to the deviation
    close(capo.whiten(t64(small)), oracle.whiten(small))
    assert float(capo.whiten(t64(small))[1]) == pytest.approx(1 / (math.sqrt(2) + 1), rel=1e-6)


@pytest.mark.parametrize(
    "x",
    [[], [4.2], [0.35] * 7, [0.1 + 0.2, 0.3, 0.3], [1e6 + 1e-7, 1e6], [0.0, 0.0], [-5e-13, 4e-13], [-3.0, -3.0 - 2e-12]],
)
def test_tied_rows_give_exactly_zero(x):
    out = capo.whiten(t64(x))
    assert out.tolist() == [0.0] * len(x)


@pytest.mark.parametrize("x", [[1.0, 1.0 + 3e-12], [0.0, 2e-12], [1e6, 1e6 + 1e-5]])
def test_barely_different_is_no_tie(x):
    assert float(capo.whiten(t64(x))[1]) > 0


def test_returns_are_not_whitened_and_inputs_are_not_written():
    case = VECTORS["gae"][1]
    rewards, values = t64(case["rewards"]), t64(case["values"])
    v = torch.randn(len(rewards), 3, dtype=torch.float64)
    mask = torch.ones(len(rewards), 3, dtype=torch.bool)
    kept = [x.clone() for x in (rewards, values, v, mask)]
    adv, ret = capo.action_gae(rewards=rewards, values=values, traj=case["traj"], step=case["step"], gamma=0.95, lam=0.9)
    capo.whiten(adv)
    close(ret, adv + values)
    capo.token_gae(rewards=rewards, values=v, mask=mask, traj=case["traj"], step=case["step"])
    assert all(torch.equal(a, b) for a, b in zip(kept, (rewards, values, v, mask)))


def test_token_gae_by_hand():
    """Rows of 2 and 1 tokens, reward 1 at the end, gamma 0.5: one discount per token, none for what lies between."""
    v, mask = pad([[0.1, 0.2], [0.3]])
    kwargs = dict(rewards=t64([0.0, 1.0]), traj=[5, 5], step=[0, 1], gamma=0.5)
    adv, ret = capo.token_gae(values=v, mask=mask, lam=1.0, **kwargs)
    close_rows(adv, mask, [[0.25 - 0.1, 0.5 - 0.2], [1.0 - 0.3]])
    close_rows(ret, mask, [[0.25, 0.5], [1.0]])
    _, ret = capo.token_gae(values=v, mask=mask, lam=0.0, **kwargs)
    close_rows(ret, mask, [[0.5 * 0.2, 0.5 * 0.3], [1.0]])  # the last token's next value is the next step's first


def test_token_gae_of_single_tokens_is_action_gae():
    case = VECTORS["gae"][0]
    v = t64(case["values"])[:, None]
    adv, ret = capo.token_gae(rewards=t64(case["rewards"]), values=v, mask=torch.ones_like(v, dtype=torch.bool),
                              traj=case["traj"], step=case["step"], gamma=0.99, lam=1.0)  # fmt: skip
    close(adv[:, 0], case["advantages"])
    close(ret[:, 0], case["returns"])


@few
@given(st.integers(0, 10**6))
def test_observation_tokens_change_no_credit(seed):
    rng = random.Random(seed)
    traj, step = shuffled_steps(rng)
    v_rows = ragged(rng, len(traj), 1.0, empty=False)
    kwargs = dict(rewards=t64([rng.gauss(0, 1) for _ in traj]), traj=traj, step=step, gamma=0.9, lam=0.9)
    tight, tight_mask = pad(v_rows)
    loose, loose_mask = pad(v_rows, rng, width=60)
    a, b = (capo.token_gae(values=v, mask=m, **kwargs) for v, m in ((tight, tight_mask), (loose, loose_mask)))
    for x, y in zip(a, b):
        close_rows(y, loose_mask, unpad(x, tight_mask))


def test_an_early_token_keeps_a_later_steps_reward():
    v, mask = pad([[0.0] * 3, [0.0] * 2, [0.0]])
    adv, _ = capo.token_gae(rewards=t64([0, 0, 1]), values=v, mask=mask, traj=[1, 1, 1], step=[0, 1, 2], gamma=1.0, lam=1.0)
    close_rows(adv, mask, [[1.0] * 3, [1.0] * 2, [1.0]])
    assert ((adv != 0).sum(1) == mask.sum(1)).all()


def test_reward_of_an_empty_reply_stays_in_its_trajectory():
    """It has no token to land on: in no case the last padded cell, in no case another trajectory."""
    v, mask = pad([[0.1, 0.2], [], [0.3], [0.4, 0.5, 0.6]])
    kwargs = dict(values=v, mask=mask, traj=[1, 1, 1, 2], step=[0, 1, 2, 0], gamma=0.9, lam=1.0)
    without, _ = capo.token_gae(rewards=t64([0, 0, 1, 1]), **kwargs)
    adv, ret = capo.token_gae(rewards=t64([0, 5, 1, 1]), **kwargs)
    assert (adv[~mask] == 0).all() and (ret[~mask] == 0).all()
    assert torch.equal(adv[2:], without[2:])  # nor a later step, which did not earn it


# ------------------------------------------------------------------------------------------------- ratio


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_is_exactly_one_at_the_rollout_policy(kind):
    for dtype in (torch.float32, torch.float64):
        z, mask = pad([[0.0] * n for n in (1, 2, 7, 300)])
        w = capo.action_ratio(z.to(dtype), mask, mu=mean_of_batch(z.to(dtype), mask), kind=kind)
        assert w.tolist() == [1.0] * 4


@few
@given(rows_of_tokens)
def test_one_token_gives_its_own_ratio(rows):
    rows = rows + [[0.123]]
    close(weights(rows)[-1], math.exp(0.123))


@few
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), log_ratios)
def test_equal_log_ratios_give_the_same_ratio_at_every_length(lengths, c):
    for alpha in (0.5, 0.3, 1.0, 0.0):
        close(weights([[c] * n for n in lengths], alpha=alpha), [math.exp(c)] * len(lengths))


@few
@given(rows_of_tokens)
def test_weighted_by_root_length_the_actions_balance(rows):
    z, mask = pad(rows)
    mu = mean_of_batch(z, mask)
    log_w = capo.action_ratio(z, mask, mu=mu).log()
    close((mask.sum(1).double().sqrt() * (log_w - mu)).sum(), 0.0)


@few
@given(st.lists(log_ratios, min_size=1, max_size=20))
def test_one_action_alone_gives_the_geometric_mean(row):
    close(weights([row])[0], math.exp(sum(row) / len(row)))


@few
@given(rows_of_tokens, log_ratios)
def test_alpha_one_is_the_geometric_mean_and_alpha_zero_the_shifted_product(rows, mu):
    z, mask = pad(rows)
    close(capo.action_ratio(z, mask, mu=mu, alpha=1.0), [math.exp(sum(r) / len(r)) for r in rows])
    close(capo.action_ratio(z, mask, mu=mu, alpha=0.0), [math.exp(sum(r) - (len(r) - 1) * mu) for r in rows])
    for kind, alpha in (("sqrt", 0.5), ("mean", 1.0), ("product", 0.0)):  # the variants: no centring
        close(capo.action_ratio(z, mask, mu=0.0, alpha=alpha), capo.action_ratio(z, mask, mu=mu, kind=kind))


@pytest.mark.parametrize("lengths", [(1, 2, 3), (4, 4), (9, 1), (16, 2, 6, 1, 30)])
def test_variance_of_log_ratio_does_not_depend_on_length(lengths):
    """log w is linear in z: its variance for i.i.d. z of variance 1 is the sum of its squared slopes.
    In a batch of N tokens that is 1 - (L - 1) / N, since mu holds the row's own tokens too."""
    n, scale = sum(lengths), 1e-3
    for i, length in enumerate(lengths):
        total = 0.0
        for k in range(n):
            flat = [scale * (k == j) for j in range(n)]
            rows = [[flat.pop(0) for _ in range(size)] for size in lengths]
            total += (float(weights(rows)[i].log()) / scale) ** 2
        assert total == pytest.approx(1 - (length - 1) / n, rel=1e-9)


def test_variance_of_log_ratio_by_simulation():
    generator = torch.Generator().manual_seed(0)
    z = 0.01 * torch.randn(3000, 64, generator=generator, dtype=torch.float64)
    for length in (1, 4, 16, 64):
        mask = (torch.arange(64) < length).expand(3000, 64)
        log_w = capo.action_ratio(z, mask, mu=0.0).log()
        assert float(log_w.std()) == pytest.approx(0.01, rel=0.06)


def test_center_is_token_weighted_and_carries_no_gradient():
    z, mask = pad([[1.0], [4.0, 4.0, 4.0]])
    z.requires_grad_()
    total, count = capo.center(z, mask)
    assert float(total) == 13.0 and float(count) == 4.0
    assert not torch.as_tensor(total).requires_grad
    parts = [capo.center(z[i : i + 1], mask[i : i + 1]) for i in range(2)]  # sums add up over micro-batches and ranks
    assert float(sum(p[0] for p in parts)) == 13.0 and float(sum(p[1] for p in parts)) == 4.0


def test_no_tokens_at_all():
    z, mask = torch.full((3, 4), NAN, dtype=torch.float64, requires_grad=True), torch.zeros(3, 4, dtype=torch.bool)
    total, count = capo.center(z, mask)
    assert float(total) == 0.0 and float(count) == 0.0
    loss, active = capo.policy_loss(z, mask, t64([1.0, -1.0, NAN]), mu=0.0)
    assert loss.tolist() == [0.0] * 3 and not active.any()
    loss.sum().backward()
    assert (z.grad == 0).all()


# ------------------------------------------------------------------------------------------------- clip and loss


def test_only_the_better_side_is_clipped():
    """Ratios 0.8, 1 and 1.25 with eps 0.1, advantage +2 and -2."""
    z = t64([[math.log(w)] for w in (0.8, 1.0, 1.25)] * 2).requires_grad_()
    adv = t64([2.0] * 3 + [-2.0] * 3)
    loss, active = capo.policy_loss(z, torch.ones_like(z, dtype=torch.bool), adv, mu=0.0, eps=0.1)
    close(loss.detach(), [-1.6, -2.0, -2.2, 1.8, 2.0, 2.5])
    assert active.tolist() == [False, False, True, True, False, False]
    loss.sum().backward()
    close(z.grad[:, 0], [-1.6, -2.0, 0.0, 0.0, 2.0, 2.5])


def test_eps_of_one_thousandth_is_the_default():
    z = t64([[9e-4], [1.1e-3], [-9e-4], [-1.1e-3]])
    _, active = capo.policy_loss(z, torch.ones_like(z, dtype=torch.bool), t64([1.0, 1.0, -1.0, -1.0]), mu=0.0)
    assert active.tolist() == [False, True, False, True]


@few
@given(rows_of_tokens, st.floats(-2, 2), st.integers(0, 6))
def test_gradient_of_an_action_is_over_the_root_of_its_length(rows, a, which):
    """d objective / d logits = A w L^-1/2 sum_i grad log pi(a_i) / B, through a softmax, with no path through mu."""
    which %= len(rows)
    vocabulary, generator = 5, torch.Generator().manual_seed(len(rows))
    width = max(map(len, rows))
    logits = torch.randn(len(rows), width, vocabulary, generator=generator, dtype=torch.float64, requires_grad=True)
    taken = torch.randint(vocabulary, (len(rows), width), generator=generator)
    logp = logits.log_softmax(-1).gather(-1, taken[..., None])[..., 0]
    shift, mask = pad(rows, fill=0.0)
    z = logp - (logp.detach() - shift)  # these log-ratios, with the gradient of log pi
    adv = torch.zeros(len(rows), dtype=torch.float64)
    adv[which] = a
    mu = mean_of_batch(z, mask)
    loss, _ = capo.policy_loss(z, mask, adv, mu=mu, eps=1e9)
    (grad,) = torch.autograd.grad(loss.sum() / len(rows), logits, retain_graph=True)
    length, w = len(rows[which]), oracle.ratio(rows[which], oracle.center(rows))
    (of_logp,) = torch.autograd.grad((logp * mask)[which].sum(), logits)
    close(-grad, a * w / math.sqrt(length) * of_logp / len(rows))
    others = torch.arange(len(rows)) != which
    assert (grad[others] == 0).all()  # an action does not move another one through mu


@few
@given(rows_of_tokens, st.sampled_from([NAN, INF, -INF, 1e30]))
def test_masked_cells_never_matter(rows, fill):
    adv = t64([(-1.0) ** i * (i + 1) for i in range(len(rows))])
    clean, mask = pad(rows, fill=0.0, width=12)
    dirty, _ = pad(rows, fill=fill, width=12)
    dirty.requires_grad_()
    mu = mean_of_batch(dirty, mask)
    assert float(mu) == float(mean_of_batch(clean, mask))
    for kind in KINDS:
        expected, _ = capo.policy_loss(clean, mask, adv, mu=mu, kind=kind)
        loss, _ = capo.policy_loss(dirty, mask, adv, mu=mu, kind=kind)
        assert torch.equal(loss.detach(), expected)
        (grad,) = torch.autograd.grad(loss.sum(), dirty)
        assert (grad[~mask] == 0).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(kind, dtype):
    """1,000 tokens of 0.05 each, and single tokens of +-100: clamped at 20 before exp."""
    z, mask = pad([[0.05] * 1000, [-0.05] * 1000, [100.0], [-100.0], [60.0, 60.0, 60.0]])
    for a in (1.0, -1.0):
        x = z.to(dtype).requires_grad_()
        w = capo.action_ratio(x.detach(), mask, mu=0.0, kind=kind)
        assert torch.isfinite(w).all() and float(w.max()) <= math.exp(20) * 1.0001
        loss, _ = capo.policy_loss(x, mask, torch.full((5,), a, dtype=dtype), mu=0.0, kind=kind)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    assert float(w[2]) == pytest.approx(math.exp(20), rel=1e-5) and float(w[3]) == pytest.approx(math.exp(-20), rel=1e-5)
    x = t64([100.0, -100.0]).to(dtype).requires_grad_()
    for a in (1.0, -1.0):
        loss = capo.token_loss(x, torch.full((2,), a, dtype=dtype))
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    penalty = capo.kl_penalty(x, torch.zeros(2, dtype=dtype))
    penalty.sum().backward()
    assert penalty.tolist() == [10.0, 10.0] and torch.isfinite(x.grad).all()


def test_whitened_loss_is_zero_in_value_but_not_in_gradient_at_ratio_one():
    z, mask = pad([[0.0] * n for n in (2, 5, 1, 3)])
    z.requires_grad_()
    loss, active = capo.policy_loss(z, mask, capo.whiten(t64([0.0, 2.0, 0.0, 3.0])), mu=0.0)
    loss.mean().backward()
    assert abs(float(loss.mean().detach())) < 1e-12 and not active.any()
    assert (z.grad.abs()[mask] > 0.01).all()


def test_after_one_large_step_ratios_move_and_some_clips_act():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    taken = torch.randint(8, (6, 4), generator=generator)
    mask = torch.arange(4) < torch.tensor([1, 2, 3, 4, 4, 2])[:, None]
    adv = capo.whiten(torch.randn(6, generator=generator, dtype=torch.float64))

    def objective():
        logp = logits.log_softmax(-1).gather(-1, taken[..., None])[..., 0]
        z = logp - old
        mu = mean_of_batch(z, mask)
        return capo.policy_loss(z, mask, adv, mu=mu), capo.action_ratio(z, mask, mu=mu)

    old = logits.log_softmax(-1).gather(-1, taken[..., None])[..., 0].detach()
    (loss, active), w = objective()
    assert not active.any() and w.tolist() == [1.0] * 6
    (grad,) = torch.autograd.grad(loss.mean(), logits)
    with torch.no_grad():
        logits -= 5.0 * grad
    (after, active), w = objective()
    assert active.any() and float((w - 1).abs().max().detach()) > 1e-2
    assert float(after.mean().detach()) < float(loss.mean().detach())  # and in the right direction


def test_dual_clip_by_hand():
    z = t64([math.log(w) for w in (0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 10.0)]).requires_grad_()
    loss = capo.token_loss(z, t64([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]))
    close(loss.detach(), [-0.5, -1.0, -1.2, 0.8, 1.0, 2.0, 3.0])
    loss.sum().backward()
    close(z.grad, [-0.5, -1.0, 0.0, 0.0, 1.0, 2.0, 0.0])


def test_value_loss_by_hand():
    """Old value 0, clip 0.5: the larger of both errors, so a clipped one pulls only when it is the larger."""
    v = t64([0.2, 2.0, 2.0, -2.0]).requires_grad_()
    loss = capo.value_loss(v, torch.zeros(4, dtype=torch.float64), t64([1.0, 3.0, 0.0, -3.0]))
    close(loss.detach(), [0.5 * 0.8**2, 0.5 * 2.5**2, 0.5 * 2.0**2, 0.5 * 2.5**2])
    loss.sum().backward()
    close(v.grad, [-0.8, 0.0, 2.0, 0.0])


@few
@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=8))
def test_kl_is_never_negative_and_zero_at_equality(pairs):
    logp, ref = t64([p[0] for p in pairs]), t64([p[1] for p in pairs])
    assert (capo.kl_penalty(logp, ref) >= 0).all()
    assert (capo.kl_penalty(logp, logp) == 0).all()


def test_kl_pulls_towards_the_reference():
    logp = t64([-1.0, -3.0]).requires_grad_()
    capo.kl_penalty(logp, t64([-2.0, -2.0])).sum().backward()
    assert float(logp.grad[0]) > 0 > float(logp.grad[1])
    close(logp.grad, [1 - math.exp(-1), 1 - math.exp(1)])


# ------------------------------------------------------------------------------------------------- what the loop calls


def iteration(seed=0, longest=6):
    """Global columns of an iteration: three trajectories, NaN beyond each row's tokens, rows in no order."""
    rng = random.Random(seed)
    traj, step = shuffled_steps(rng, trajectories=3)
    n = len(traj)
    v_rows = [[rng.gauss(0, 1) for _ in range(rng.randint(1, longest))] for _ in range(n)]
    value, mask = pad(v_rows, width=longest)
    reward = [rng.gauss(0, 1) for _ in range(n)]
    batch = dict(traj=torch.tensor(traj), step=torch.tensor(step), reward=t64(reward), value=value, mask=mask,
                 truncated=torch.tensor([t == traj[0] for t in traj]))  # fmt: skip
    return batch, v_rows


def minibatch(n, seed=0, per_token_adv=False, values_per_token=False):
    """A mini-batch of n rows, the third without any token; masked cells hold NaN. Also the same as ragged rows."""
    rng = random.Random(seed)
    lengths = [0 if i == 2 else rng.randint(1, 7) for i in range(n)]
    rows = []
    for length in lengths:
        old = [rng.gauss(-1, 0.5) for _ in range(length)]
        rows.append(
            dict(
                logp=[x + rng.gauss(0, 0.15) for x in old],
                logp_old=old,
                logp_ref=[x + rng.gauss(0, 0.3) for x in old],
                entropy=[rng.random() for _ in range(length)],
                adv=[rng.gauss(0, 1) for _ in range(length)] if per_token_adv else rng.gauss(0, 1),
            )
        )
    columns = {k: pad([r[k] for r in rows], width=8)[0] for k in ("logp", "logp_old", "logp_ref", "entropy")}
    mask = pad([r["logp"] for r in rows], width=8)[1]
    if per_token_adv:
        columns["adv"] = pad([r["adv"] for r in rows], width=8)[0]
    else:
        columns["adv"] = t64([r["adv"] for r in rows])[:, None]
    width = 8 if values_per_token else 1
    value = {k: t64([[rng.gauss(0, 1) for _ in range(width)] for _ in range(n)]) for k in ("value", "value_old", "ret")}
    out = {"logp": columns.pop("logp"), "entropy": columns.pop("entropy"), "value": value.pop("value")}
    return out, dict(columns, mask=mask, **value), rows


def run_loss(out, batch, cfg, chunks):
    return splits.run_loss(capo, out, batch, cfg, chunks, wrt=("logp", "value"))


VARIANTS = [("action", "action"), ("sqrt", "action"), ("mean", "action"), ("product", "action"), ("token", "action"),
            ("action", "token"), ("token", "token")]  # fmt: skip


LOSS = dict(eps=0.05, alpha=0.4, token_eps=0.1, dual_clip=1.5, kl_coef=0.01, entropy_coef=0.02)  # no default among them


def slow_total(rows, *, mu, ratio="action"):
    """The oracle's loss at these settings."""
    return oracle.total(rows, mu=mu, ratio=ratio, c=LOSS["dual_clip"], **{name: x for name, x in LOSS.items() if name != "dual_clip"})


def variant(ratio, credit, n, seed=0, **settings):
    cfg = capo.Config(ratio=ratio, credit=credit, **LOSS, value_clip=0.3, **settings)
    tokens = "token" in (ratio, credit)
    return cfg, *minibatch(n, seed, per_token_adv=credit == "token", values_per_token=tokens)


def test_defaults_are_the_papers():
    cfg = capo.Config()
    assert (cfg.gamma, cfg.lam, cfg.alpha, cfg.eps) == (0.99, 1.0, 0.5, 0.001)
    assert (cfg.token_eps, cfg.dual_clip, cfg.value_clip) == (0.2, 3.0, 0.5)
    assert (cfg.kl_coef, cfg.entropy_coef, cfg.ratio, cfg.credit) == (0.001, 0.0, "action", "action")


@pytest.mark.parametrize("ratio,credit", VARIANTS)
def test_loss_equals_the_slow_loops(ratio, credit):
    for seed in range(10):
        cfg, out, batch, rows = variant(ratio, credit, 6, seed)
        for r in rows:  # what one term of the loss takes: its action's advantage, or each token's
            if ratio == "token" and credit == "action":
                r["adv"] = [r["adv"]] * len(r["logp"])
            if ratio != "token" and credit == "token" and r["adv"]:
                r["adv"] = sum(r["adv"]) / len(r["adv"])
        mu = oracle.center([[a - b for a, b in zip(r["logp"], r["logp_old"])] for r in rows])
        expected = slow_total(rows, mu=mu, ratio=ratio)
        per_value, count = 0.0, 0
        for i, r in enumerate(rows):
            for k in range(len(r["logp"]) if batch["ret"].shape[1] > 1 else min(1, len(r["logp"]))):
                v, old, ret = (float(x[i, k]) for x in (out["value"], batch["value_old"], batch["ret"]))
                per_value += oracle.value(v, old, ret, 0.3)[0]
                count += 1
        total, _, _ = run_loss(out, batch, cfg, [slice(None)])
        close(total, expected + per_value / count)


@pytest.mark.parametrize("n", [7, 9])
@pytest.mark.parametrize("ratio,credit", VARIANTS)
def test_loss_does_not_depend_on_the_split(ratio, credit, n):
    cfg, out, batch, _ = variant(ratio, credit, n, seed=n)
    splits.check_splits(capo, out, batch, cfg, wrt=("logp", "value"))
    _, (grad, _), _ = run_loss(out, batch, cfg, [slice(None)])
    assert (grad[~batch["mask"]] == 0).all()


def test_mean_of_means_is_not_taken():
    """10 tokens of loss 1 and 2 tokens of loss 7: 2.0, not 4.0."""
    cfg = capo.Config(ratio="token", kl_coef=0.0)
    logp, mask = pad([[-1.0] * 10, [-1.0] * 2])
    batch = dict(logp_old=logp, logp_ref=logp, mask=mask, adv=t64([[-1.0], [-7.0]]), value_old=torch.zeros_like(logp),
                 ret=torch.zeros(2, 1, dtype=torch.float64))  # fmt: skip
    out = {"logp": logp, "entropy": torch.zeros_like(logp), "value": torch.zeros_like(logp)}
    for chunks in ([slice(None)], [slice(0, 1), slice(1, 2)]):
        close(run_loss(out, batch, cfg, chunks)[0], 2.0)
    action = capo.Config(kl_coef=0.0)  # one term per action: (1 + 7) / 2
    out["value"], batch["value_old"] = out["value"][:, :1], batch["value_old"][:, :1]
    for chunks in ([slice(None)], [slice(0, 1), slice(1, 2)]):
        close(run_loss(out, batch, action, chunks)[0], 4.0)


def test_policy_and_critic_losses_may_be_asked_for_apart():
    cfg, out, batch, _ = variant("action", "action", 6)
    pre, denom = capo.pre_update(out["logp"], batch, cfg), capo.denominators(batch, cfg)
    both, _ = capo.loss(out, batch, cfg, pre=pre, denom=denom)
    policy, names = capo.loss({k: out[k] for k in ("logp", "entropy")}, batch, cfg, pre=pre, denom=denom)
    critic, other = capo.loss({"value": out["value"]}, batch, cfg, pre=pre, denom=denom)
    close(policy + critic, both)
    assert names and other and not set(names) & set(other)


def test_denominators_count_what_is_real():
    _, batch, _ = minibatch(6)
    rows, tokens = 5, int(batch["mask"].sum())
    assert {k: int(v) for k, v in capo.denominators(batch, capo.Config()).items()} == dict(policy=rows, kl=tokens, value=rows)
    counts = {k: int(v) for k, v in capo.denominators(batch, capo.Config(ratio="token", credit="token")).items()}
    assert counts == dict(policy=tokens, kl=tokens, value=tokens)


@pytest.mark.parametrize("ratio,credit", VARIANTS)
def test_a_minibatch_without_any_token_has_loss_zero(ratio, credit):
    cfg, out, batch, _ = variant(ratio, credit, 3)
    batch["mask"] = torch.zeros_like(batch["mask"])
    total, grads, _ = run_loss(out, batch, cfg, [slice(None)])
    assert float(total) == 0.0 and all((g == 0).all() for g in grads)


def test_mu_is_what_pre_update_sums():
    """Twice the token count halves mu: `loss` uses the sums it is given, not those of its own rows."""
    cfg, out, batch, rows = variant("action", "action", 6)
    z = [[a - b for a, b in zip(r["logp"], r["logp_old"])] for r in rows]
    pre, denom = capo.pre_update(out["logp"], batch, cfg), capo.denominators(batch, cfg)
    close(pre, [sum(map(sum, z)), float(batch["mask"].sum())])
    share = {k: out[k] for k in ("logp", "entropy")}
    for factor in (1, 2):
        mu = float(pre[0] / pre[1]) / factor
        total, names = capo.loss(share, batch, cfg, pre=pre * t64([1, factor]), denom=denom)
        close(total, slow_total(rows, mu=mu))
        value, count = names["policy/mu"]
        close(float(value) / float(count), mu)


def test_ratio_metrics_say_what_the_ratio_was():
    cfg, out, batch, rows = variant("action", "action", 9, seed=3)
    z = [[a - b for a, b in zip(r["logp"], r["logp_old"])] for r in rows if r["logp"]]
    mu = oracle.center(z)
    w = [oracle.ratio(row, mu, LOSS["alpha"]) for row in z]
    active = oracle.policy(z, [r["adv"] for r in rows if r["logp"]], mu, LOSS["eps"], LOSS["alpha"])[1]
    _, _, (names,) = run_loss(out, batch, cfg, [slice(None)])
    mean = {k: float(a) / float(b) for k, (a, b) in names.items() if b is not None and float(b)}
    close(mean["policy/ratio"], sum(w) / len(w))
    close(float(names["policy/ratio/max"][0]), max(w))
    assert any(active) and mean["policy/clip_frac"] == pytest.approx(sum(active) / len(w))
    bins = [name for name in names if name.startswith("policy/clip_frac/len")]
    assert sum(int(names[b][0]) for b in bins) == sum(active) and sum(int(names[b][1]) for b in bins) == len(w)


def test_clip_metric_of_the_token_ratio():
    """It counts where the clip decides the term; at advantage 0 nothing does."""
    cfg, out, batch, rows = variant("token", "token", 9, seed=4)
    first = batch["mask"][0].nonzero()[0, 0]
    out["logp"][0, first] = batch["logp_old"][0, first] + 1.0
    batch["adv"][0, first] = 0.0
    mask = batch["mask"]
    active = 0
    for z, a in zip((out["logp"] - batch["logp_old"])[mask].tolist(), batch["adv"][mask].tolist()):
        active += oracle.clip(math.exp(z), 0.9, 1.1) * a < math.exp(z) * a
    _, _, (names,) = run_loss(out, batch, cfg, [slice(None)])
    assert active > 0 and int(names["policy/clip_frac"][0]) == active


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_actions_are_whitened_over_rows_and_shared_by_tokens(seed):
    batch, v_rows = iteration(seed)
    order = [batch[k].tolist() for k in ("reward", "traj", "step")]
    cfg = capo.Config(gamma=0.9, lam=0.7)
    adv, ret = oracle.gae(order[0], [row[0] for row in v_rows], *order[1:], 0.9, 0.7)
    for value in (batch["value"], batch["value"][:, :1]):  # the critic's whole row, or its state value alone
        result = capo.advantages(dict(batch, value=value), cfg)
        close(result["adv"][:, 0], oracle.whiten(adv), 1e-5)
        close(result["ret"][:, 0], ret, 1e-5)
        assert result["adv"].shape == result["ret"].shape == (len(adv), 1)
    more = torch.cat([batch["mask"], torch.zeros(len(adv), 50, dtype=torch.bool)], 1)  # padding changes nothing
    wide = torch.cat([batch["value"], torch.full((len(adv), 50), NAN, dtype=torch.float64)], 1)
    assert torch.equal(capo.advantages(dict(batch, mask=more, value=wide), cfg)["adv"], result["adv"])


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_tokens_are_whitened_over_tokens(seed):
    batch, v_rows = iteration(seed)
    order = [batch[k].tolist() for k in ("reward", "traj", "step")]
    adv, ret = oracle.token_gae(order[0], v_rows, *order[1:], 0.9, 0.7)
    white = iter(oracle.whiten([a for row in adv for a in row]))
    result = capo.advantages(batch, capo.Config(credit="token", gamma=0.9, lam=0.7))
    mask = batch["mask"]
    close_rows(result["adv"], mask, [[next(white) for _ in row] for row in adv], 1e-5)
    close_rows(result["ret"], mask, ret, 1e-5)
    if mask.sum() > 1:
        assert ((result["adv"] != 0).sum(1) == mask.sum(1)).all()  # credit on exactly the step's own tokens


@pytest.mark.parametrize("credit", ["action", "token"])
def test_a_tied_batch_gives_exactly_zero_advantages(credit):
    n = 7
    mask = torch.ones(n, 1, dtype=torch.bool)
    batch = dict(traj=list(range(n)), step=[0] * n, reward=[0.35] * n, value=torch.zeros(n, 1), mask=mask,
                 truncated=[False] * n)  # fmt: skip
    assert (capo.advantages(batch, capo.Config(credit=credit))["adv"] == 0).all()
    batch["reward"] = [0.1 + 0.2, 0.3] + [0.3] * (n - 2)
    assert (capo.advantages(batch, capo.Config(credit=credit))["adv"] == 0).all()


def test_a_truncated_trajectory_ends_with_value_zero_unless_asked():
    batch, _ = iteration(1)
    default = capo.advantages(batch, capo.Config())["ret"]
    off = capo.advantages(dict(batch, truncated=torch.zeros_like(batch["truncated"])), capo.Config())["ret"]
    assert torch.equal(default, off)
    supplied = dict(batch, bootstrap={int(batch["traj"][0]): 5.0})
    assert torch.equal(capo.advantages(supplied, capo.Config())["ret"], default)
    on = capo.advantages(supplied, capo.Config(bootstrap_truncated=True))["ret"]
    mine = batch["traj"] == batch["traj"][0]
    assert (on[mine] > default[mine]).all() and torch.equal(on[~mine], default[~mine])
    never = dict(supplied, truncated=torch.zeros_like(batch["truncated"]))  # terminated: V_T is 0, whatever is supplied
    assert torch.equal(capo.advantages(never, capo.Config(bootstrap_truncated=True))["ret"], default)


def test_missing_and_doubled_steps_are_errors():
    kwargs = dict(rewards=t64([0.0, 0.0]), values=t64([0.0, 0.0]), traj=[1, 1], gamma=1.0, lam=1.0)
    for step in ([0, 0], [0, 2], [1, 2]):
        with pytest.raises(ValueError, match="1"):
            capo.action_gae(step=step, **kwargs)
    with pytest.raises((AssertionError, ValueError)):
        capo.center(torch.zeros(2, 3), torch.ones(2, 3))  # a mask that is not bool


def test_empty_reply_hands_its_reward_to_the_token_before_it():
    v, mask = pad([[0.1, 0.2], [], [0.3]])
    moved, own = (
        capo.token_gae(rewards=t64(r), values=v, mask=mask, traj=[1, 1, 1], step=[0, 1, 2], gamma=0.9, lam=0.8)[0]
        for r in ([1.0, 5.0, 2.0], [6.0, 0.0, 2.0])
    )
    assert torch.equal(moved, own)


def test_kl_coefficient_zero_needs_no_reference():
    cfg, out, batch, _ = variant("action", "action", 6)
    cfg.kl_coef = 0.0
    with_ref, _, _ = run_loss(out, batch, cfg, [slice(None)])
    del batch["logp_ref"]
    close(run_loss(out, batch, cfg, [slice(None)])[0], with_ref)


def test_noise_of_bf16_is_as_wide_as_the_clip_band():
    """Why the trainer measures |w - 1| at unchanged weights: bf16 log-probs alone leave the default band."""
    generator = torch.Generator().manual_seed(0)
    logp = -5 * torch.rand(64, 40, generator=generator)
    z, mask = logp.bfloat16().float() - logp, torch.ones(64, 40, dtype=torch.bool)
    w = capo.action_ratio(z, mask, mu=mean_of_batch(z, mask).float())
    assert float((w - 1).abs().max()) > capo.Config().eps
