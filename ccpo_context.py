"""CCPO: Contextual Credit Policy Optimization (arXiv 2610.19103), in one file.

An LLM agent plays each task several times. Where two trajectories of a task saw the same observation, what became of the
one says what to expect of the other: CCPO credits a step by comparing it with such *peers*, without a critic. Peers are
weighted by how alike their contexts are, which a frozen model's hidden state and a short summary of the history tell:

  history   C^H  did this step's return beat what its peers got from here?
  future    C^F  did the next few steps move the trajectory to where peers do better, or worse?
  episode   A_EP did the whole trajectory beat the others of its task? Optional, as in GRPO

Symbols
  i, t, T    trajectory, step in it, number of steps                  R_i      outcome of the trajectory
  u, v       two steps (i, t), (j, s) of one task                     E_u, B   peers of a step, the bucket they come from
  phi, h, c  context feature: of hidden state and history summary     w, tau_B weight of a peer, bandwidth
  Y, Z       return with, and outcome without, the step's penalty     V        outcome that peers lead to expect
  gamma, eta discount per step, penalty of an invalid action          K_F      steps looked ahead
  nu(x)      x / max(|x|, 1e-9)                                       N_x      z-score over the rows of a task

Equations
  Eq. 1    rewards_to_go        sum_{u>=t} gamma^{u-t} r_u
  Eq. 1    return_target        Y = rewards to go - eta 1[invalid];  outcome alone: gamma^{T-1-t} R - eta 1[invalid]
  Eq. 2    peer_buckets         E_u = steps of other trajectories with u's task and observation; if none, with u's task
  Eq. 3    peer_weights         w_{u,v} = exp(-|phi_u - phi_v| / tau_B),  tau_B = 0.15 median distance in B
  Eq. 4    readout              B_u[r] = sum_v w_{u,v} r_v / sum_v w_{u,v}
  Eq. 5    historical_credit    C^H = Y - B[Y]
  Eq. 6    outcome_target       Z_t = gamma^{T-t} R
  Eq. 6    value_change         V_t = B[Z] for t < T,  V_T = R
  Eq. 7    value_change         dV = V_{min(t+K_F, T)} - V_t
  Eq. 7    future_credit        C^F = (dV - mean) / (std + 1e-6)
  Eq. 8    total_advantage      A = N_x[C^H + C^F] + alpha_EP A_EP
  Eq. 9    context_features     phi = nu([nu(P(h - mean)); nu(c)]),  P removes the three leading directions
  Eq. 10   split_change         V_{t+h} - V_t = (gamma^h V_{t+h} - V_t) + (1 - gamma^h) V_{t+h}
  Eq. 11   normalize_channels   A^d = (C^d - mean C^d) / (std(C^H + C^F) + 1e-6),  A_CC = A^H + A^F

Choices
  - Paper silent: the same task means the same group id, whatever the prompts say.
  - Paper silent: rows with one prompt share the hidden state of the smallest (trajectory, step) among them.
  - Paper silent: a projected hidden state below 1e-9 of the largest hidden state is rounding and counts as 0.
  - Paper silent: a group whose values are equal, up to float residue, gives exactly 0.
  - Paper silent: copies of a step have to agree in everything, the hidden state included.
  - Paper silent: the KL estimate of a token is at most 10; beyond that it no longer pulls.
  - Paper silent: log-ratios are clamped to [-20, 20] before exp.

Run `python ccpo_context.py` for a worked example, `torchrun --nproc_per_node=2 train.py --algo ccpo_context` to train.
This file needs torch, NumPy and the standard library only; copy it. All credit is float64 and carries no gradient.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------- settings


@dataclass
class Config:
    gamma: float = 0.95  # discount per step [paper]
    eta: float = 0.1  # penalty of an invalid action, in the step's own return and episode score only [paper]
    k_future: int = 2  # steps that future credit looks ahead [paper]
    kernel: Literal["exp", "uniform", "cosine"] = "exp"  # weight of a peer by distance; the others are ablations [paper]
    exclude_self: bool = True  # peers come from other trajectories; off is an ablation [paper]
    summary_weight: float = 1.0  # weight of the history summary in the feature; 0 is an ablation [paper]
    history_weight: float = 1.0  # weight of historical credit; 0 is an ablation [paper]
    future_weight: float = 1.0  # weight of future credit; 0 is an ablation [paper]
    normalize: Literal["task", "none"] = "task"  # N_x: z-score over the rows of a task, or nothing (WebShop) [authors]
    alpha_ep: float = 0.0  # weight of the episode advantage, 0 or 1 in the paper [paper]
    normalize_ep: Literal["zscore", "center"] = "zscore"  # of the episode advantage; center goes with normalize=none [authors]
    eps: float = 0.2  # clip range of the token ratio [paper]
    dual_clip: float = 3.0  # bound on the loss of a token with negative advantage, in units of -A [authors]
    kl_coef: float = 0.01  # weight of the KL penalty to the starting policy [paper]
    entropy_coef: float = 0.001  # weight of the entropy bonus [authors]

    def __post_init__(self):
        at_most_1, at_least_1 = ("gamma", "alpha_ep"), ("k_future", "dual_clip")
        any_size = ("eta", "eps", "summary_weight", "history_weight", "future_weight", "kl_coef", "entropy_coef")
        for names, low, high in ((at_most_1, 0, 1), (at_least_1, 1, float("inf")), (any_size, 0, float("inf"))):
            for name in names:
                if not low <= getattr(self, name) <= high:
                    raise ValueError(f"{name} {getattr(self, name)}: give a number from {low} to {high}.")

    @property
    def clip_width(self) -> float:
        return self.eps


NEEDS = ("reference", "hidden", "groups")

# Settings of the trainer per preset and environment; every one is a flag of train.py.
_PAPER = dict(
    model="Qwen/Qwen2.5-1.5B-Instruct", style="think_action", tasks=16, rollouts=8, passes=1, lr=1e-6, history_length=2,
    response_tokens=512, iterations=150, temperature=1.0, success_reward=10.0, eval_temperature=0.4, eval_every=5, grad_checkpoint=True,
)  # fmt: skip
PRESETS = {
    "paper": {
        "alfworld": dict(_PAPER, minibatch=256, max_steps=50, prompt_tokens=2048),
        "webshop": dict(_PAPER, minibatch=64, max_steps=15, prompt_tokens=4096, normalize="none", normalize_ep="center"),
    },
    "mini": {
        "alfworld": dict(
            model="mini/agent", data="mini", style="think_action", tasks=16, rollouts=8, minibatch=256, passes=1, lr=2e-4,
            lr_warmup=3, max_steps=10, history_length=2, prompt_tokens=448, response_tokens=48, iterations=36, temperature=1.0,
            success_reward=10.0, eval_temperature=0.4, eval_every=12,
        ),
    },
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------- features


def thermometer(value, bound: float, bins: int = 12) -> np.ndarray:
    """The first floor(bins * clip(value / bound, 0, 1)) of the bins are 1, the others 0. value: any shape S -> (*S, bins)."""
    level = np.floor(bins * np.clip(np.asarray(value) / bound, 0, 1))
    return (np.arange(bins) < level[..., None]).astype(np.float64)


def context_summary(observations) -> np.ndarray:
    """What a trajectory has been through before each step: c, (T, 37).

    Thermometers of the elapsed steps, of the distinct observations so far and of their share in the steps; then whether the
    current observation was seen before. observations: one per step, in order.
    """
    seen, distinct, revisit = set(), [], []
    for o in observations:
        revisit.append(o in seen)
        seen.add(o)
        distinct.append(len(seen))
    t, distinct, revisit = np.arange(len(distinct)), np.array(distinct), np.array(revisit)
    bars = thermometer(t, 30), thermometer(distinct, 25), thermometer(distinct / (t + 1), 1)
    return np.concatenate([*bars, revisit[:, None]], 1)


def context_features(hidden, summary, *, summary_weight: float = 1.0) -> np.ndarray:
    """Unit vectors whose distance says how unlike two contexts are.  Eq. 9

    hidden: (n, d) last hidden state of the frozen model at the last prompt token; summary: (n, 37); n unique steps of the
    whole batch, all ranks. The leading directions hold what all prompts share in kind and would drown the rest; they
    need more than three steps to exist. Returns (n, d + 37).
    """
    h = _numbers(hidden, 2)
    n, largest = len(h), _norms(h).max()
    if n > 1:
        h = h - h.mean(0)
    if n > 3:
        leading = np.linalg.eigh(h.T @ h)[1][:, -3:]  # (d, 3); of the covariance: much faster than an SVD of h
        h -= h @ leading @ leading.T  # in place: h is a copy by now
    # Paper silent: a projected hidden state below 1e-9 of the largest hidden state is rounding and counts as 0.
    h = h * (_norms(h) > 1e-9 * largest)
    return _unit(np.concatenate([_unit(h), summary_weight * _unit(_numbers(summary, 2))], 1))


def shared_hidden(hidden, prompts, *, traj, step) -> np.ndarray:
    """The same hidden state for the same prompt: hidden (N, d), prompts N sequences of ids -> (N, d).

    All trajectories of a task share the first prompt. Batched differently they get states that differ in the last bits; the
    bandwidth would shrink to that noise, and noise would pick the peers.
    """
    # Paper silent: rows with one prompt share the hidden state of the smallest (trajectory, step) among them.
    traj, step, first = _list(traj), _list(step), {}
    keys = [np.asarray(ids, dtype=np.int64).tobytes() for ids in prompts]
    for n in sorted(range(len(keys)), key=lambda n: (traj[n], step[n])):
        first.setdefault(keys[n], n)
    return _numbers(hidden, 2)[[first[key] for key in keys]]


# ------------------------------------------------------------------------------------------------------------- peers


def peer_buckets(*, task, traj, obs, exclude_self: bool = True):
    """Who is compared with whom.  Eq. 2

    task, traj, obs: (n,) integers, one per unique step. Yields (queries, bucket, fallback): indices of steps, and of the
    steps they are compared with, of which those of the query's own trajectory are no peers. In a fallback the bucket is the
    whole task. Steps of a task with one trajectory are in no queries: they have no peers.
    """

    def one_trajectory(steps):
        return exclude_self and (traj[steps] == traj[steps[0]]).all()

    # Paper silent: the same task means the same group id, whatever the prompts say.
    for same_task in _groups(task):
        buckets = [same_task[k] for k in _groups(obs[same_task])]
        alone = [bucket for bucket in buckets if one_trajectory(bucket)]
        yield from ((bucket, bucket, False) for bucket in buckets if not one_trajectory(bucket))
        if alone and not one_trajectory(same_task):
            yield np.concatenate(alone), same_task, True


def peer_weights(features, queries, bucket, *, traj, kernel: str = "exp", exclude_self: bool = True):
    """How much each step of a bucket says about each query.  Eq. 3

    features: (n, f); queries (q,) and bucket (m,): indices into the steps; traj: (n,).
    Returns weights (q, m), 0 for what is no peer, and the bandwidth: from all pairs of the bucket, those within a
    trajectory included, so that it does not depend on the query.
    """
    assert kernel in ("exp", "uniform", "cosine"), f"kernel {kernel!r}: exp, uniform or cosine"
    phi, rows = features[bucket], np.searchsorted(bucket, queries)
    distance = _distances(phi)
    pairs = distance[np.triu_indices(len(phi), 1)]
    median = np.median(pairs) if len(pairs) else 0.0
    tau = 0.15 * (median if median > 1e-9 else 1.0)
    distance = distance[rows]  # (q, m)
    peer = (traj[queries][:, None] != traj[bucket]) | (not exclude_self)
    if kernel == "exp":
        weights = np.exp(-distance / tau)
    elif kernel == "uniform":
        weights = np.ones_like(distance)
    else:
        weights = np.maximum(phi[rows] @ phi.T, 0.0)
        unlike = (weights * peer).sum(1) <= 1e-12  # no peer points the same way: the nearest counts alone
        weights[unlike, np.where(peer, distance, np.inf)[unlike].argmin(1)] = 1.0
    return np.where(peer, weights, 0.0), tau


def readout(weights, values) -> np.ndarray:
    """What the peers lead to expect: weights (q, m), values (m,) -> (q,).  Eq. 4  Weights that all vanish give 0."""
    return weights @ values / np.maximum(weights.sum(1), 1e-12)


# ------------------------------------------------------------------------------------------------------------ credit


def rewards_to_go(*, rewards, traj, step, gamma: float) -> np.ndarray:
    """Discounted environment rewards from each step on, (N,) rows in any order; copies of a step count once.  Eq. 1"""
    keys, rewards, to_go = list(zip(_list(traj), _list(step), strict=True)), _numbers(rewards, 1), {}
    for (i, t), r in sorted(dict(zip(keys, rewards, strict=True)).items(), reverse=True):
        to_go[i, t] = r + gamma * to_go.get((i, t + 1), 0.0)
    return np.array([r + gamma * to_go.get((i, t + 1), 0.0) for (i, t), r in zip(keys, rewards, strict=True)])


def return_target(*, outcome, step, length, invalid, gamma: float, eta: float, env_return=None) -> np.ndarray:
    """Y: discounted outcome, or env_return where given, less the penalty of this very action. All (n,).  Eq. 1"""
    to_go = gamma ** (length - 1 - step) * outcome if env_return is None else env_return
    return to_go - eta * invalid


def outcome_target(*, outcome, step, length, gamma: float) -> np.ndarray:
    """Z: the outcome as seen from the state before a step, one discount more than Y and no penalty. All (n,).  Eq. 6"""
    return gamma ** (length - step) * outcome


def historical_credit(target, baseline) -> np.ndarray:
    """C^H: how much a step beat its peers. All (n,).  Eq. 5"""
    return target - baseline


def value_change(*, value, outcome, step, length, k_future: int) -> np.ndarray:
    """dV: the value k_future steps later, or the outcome V_T = R past the end, less the value now.  Eq. 6, Eq. 7

    All (n,), unique steps sorted by (trajectory, step); value: V_t = B[Z], NaN without peers. No discount besides the one
    inside V: reaching a valuable state sooner counts.
    """
    inside = step + k_future < length
    later = np.arange(len(step)) + np.where(inside, k_future, 0)
    return np.where(inside, value[later], outcome) - value


def future_credit(delta_value, *, task) -> np.ndarray:
    """C^F: dV standardised over the task's unique steps; 0 where it is NaN. All (n,).  Eq. 7"""
    credit = np.zeros_like(delta_value)
    for steps in _groups(task):
        steps = steps[~np.isnan(delta_value[steps])]
        credit[steps] = _standardize(delta_value[steps])
    return credit


def split_change(value, later, *, gamma: float, h: int) -> tuple[np.ndarray, np.ndarray]:
    """The two parts of V_{t+h} - V_t: discounted gain in value, and the reward of being h steps nearer the end.  Eq. 10"""
    return gamma**h * later - value, (1 - gamma**h) * later


def normalize_channels(*, historical, future, task, supported, normalize: str = "task"):
    """A^H and A^F: both channels centred, over the deviation of their sum. All (N,), rows, not unique steps.  Eq. 11

    The statistics are those of the task's supported rows; other rows get 0. normalize="none": both as they are.
    """
    if normalize == "none":
        return historical, future
    assert normalize == "task", f"normalize {normalize!r}: task or none"
    a_h, a_f = np.zeros_like(historical), np.zeros_like(future)
    for rows in _groups(task):
        rows = rows[supported[rows]]
        total = historical[rows] + future[rows]
        if not _tied(total):
            for a, credit in ((a_h, historical[rows]), (a_f, future[rows])):
                a[rows] = (credit - credit.mean()) / (total.std(ddof=1) + 1e-6)
    return a_h, a_f


def contextual_credit(
    *, task, traj, step, obs, hidden, outcome, invalid, gamma: float = 0.95, eta: float = 0.1, k_future: int = 2,
    normalize: str = "task", kernel: str = "exp", exclude_self: bool = True, summary_weight: float = 1.0,
    history_weight: float = 1.0, future_weight: float = 1.0, env_return=None,
) -> dict:  # fmt: skip
    """Contextual credit of every row, and all it is made of.

    task, traj, step, obs, outcome, invalid: (N,) rows in any order, hidden: (N, d). A trajectory has the steps 0..T-1 and its
    outcome on each of its rows; trajectory ids are unique over the batch. Copies of a step count once, and get its credit.
    env_return: (N,) discounted environment rewards from each step on, in place of gamma^(T-1-t) R.
    Returns (N,) float64 arrays: return_target Y, outcome_target Z, baseline B[Y], value V, tau, delta_value dV, historical
    C^H and future C^F after their weights, a_h, a_f, a_cc; and bool: supported (has peers), fallback (none of its
    observation). Without peers baseline, value and credit are 0, tau and delta_value NaN.
    """
    unique, copies = _unique_steps(
        task=task, traj=traj, step=step, obs=obs, hidden=hidden, outcome=outcome, invalid=invalid, env_return=env_return
    )
    task, traj, obs = (unique[name] for name in ("task", "traj", "obs"))
    ends = {name: unique[name] for name in ("outcome", "step", "length")}
    summary = np.concatenate([context_summary(obs[steps]) for steps in _groups(traj)])
    features = context_features(unique["hidden"], summary, summary_weight=summary_weight)
    y = return_target(**ends, invalid=unique["invalid"], gamma=gamma, eta=eta, env_return=unique.get("env_return"))
    z = outcome_target(**ends, gamma=gamma)

    baseline, value, tau = np.zeros_like(y), np.zeros_like(y), np.full_like(y, np.nan)
    supported, fallback = np.zeros(len(y), bool), np.ones(len(y), bool)
    for queries, bucket, alone in peer_buckets(task=task, traj=traj, obs=obs, exclude_self=exclude_self):
        weights, tau[queries] = peer_weights(features, queries, bucket, traj=traj, kernel=kernel, exclude_self=exclude_self)
        baseline[queries], value[queries] = readout(weights, y[bucket]), readout(weights, z[bucket])
        supported[queries], fallback[queries] = True, alone

    delta_value = value_change(value=np.where(supported, value, np.nan), **ends, k_future=k_future)
    credit = dict(
        return_target=y, outcome_target=z, baseline=baseline, value=value, supported=supported, fallback=fallback, tau=tau,
        historical=history_weight * np.where(supported, historical_credit(y, baseline), 0.0),
        delta_value=delta_value, future=future_weight * future_credit(delta_value, task=task),
    )  # fmt: skip
    credit = {name: x[copies] for name, x in credit.items()}  # back to rows, before the last normalisation
    channels = {name: credit[name] for name in ("historical", "future", "supported")}
    a_h, a_f = normalize_channels(**channels, task=task[copies], normalize=normalize)
    return credit | {"a_h": a_h, "a_f": a_f, "a_cc": a_h + a_f}


def episode_advantage(*, task, outcome, invalid, eta: float = 0.1, normalize: str = "zscore") -> np.ndarray:
    """A_EP: R - eta 1[invalid] of every row, z-scored or centred over the rows of its task. All (N,)."""
    assert normalize in ("zscore", "center"), f"normalize {normalize!r}: zscore or center"
    score = _numbers(outcome, 1) - eta * _numbers(invalid, 1)
    adv = np.zeros_like(score)
    for rows in _groups(np.array(_list(task))):
        adv[rows] = _standardize(score[rows], divide=normalize == "zscore")
    return adv


def total_advantage(contextual, episode, *, alpha_ep: float) -> np.ndarray:
    """A of each row, (N,): both advantages are normalised already, and their sum is not again.  Eq. 8"""
    return contextual + alpha_ep * episode


# -------------------------------------------------------------------------------------------------------------- loss


def dual_clip_loss(log_ratio: Tensor, advantages: Tensor, *, eps: float = 0.2, c: float = 3.0) -> Tensor:
    """PPO's clipped loss with dual clip, per token. All of one shape; finite input expected."""
    w = _exp(log_ratio)
    clipped = torch.minimum(w * advantages, w.clamp(1 - eps, 1 + eps) * advantages)
    return -torch.where(advantages < 0, torch.maximum(clipped, c * advantages), clipped)


def kl_penalty(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Low-variance estimate of KL(pi_theta || pi_ref) per token, in the loss and never in the reward."""
    l = (logp_ref - logp).clamp(-20, 20)  # noqa: E741
    # Paper silent: the KL estimate of a token is at most 10; beyond that it no longer pulls.
    return (l.exp() - l - 1).clamp(max=10)


# ------------------------------------------------------------------------------------------ what the training loop calls


def advantages(batch: dict, cfg: Config) -> dict:
    """Credit of every row of an iteration, all ranks together.

    batch: group, traj, step, obs, reward, invalid, outcome (N,), hidden (N, d); prompt_ids, N sequences, where prompts
    that are equal may have got hidden states that are not.
    Returns adv, float32 (N, 1), shared by all tokens of the reply, and its parts for the record.
    """
    order = dict(traj=batch["traj"], step=batch["step"])
    rows = dict(task=batch["group"], outcome=batch["outcome"], invalid=batch["invalid"], eta=cfg.eta)
    hidden = shared_hidden(batch["hidden"], batch["prompt_ids"], **order) if "prompt_ids" in batch else batch["hidden"]
    credit = contextual_credit(
        **rows, **order, obs=batch["obs"], hidden=hidden, gamma=cfg.gamma, k_future=cfg.k_future, normalize=cfg.normalize,
        kernel=cfg.kernel, exclude_self=cfg.exclude_self, summary_weight=cfg.summary_weight, history_weight=cfg.history_weight,
        future_weight=cfg.future_weight, env_return=rewards_to_go(rewards=batch["reward"], gamma=cfg.gamma, **order),
    )  # fmt: skip
    episode = episode_advantage(**rows, normalize=cfg.normalize_ep)
    adv = total_advantage(credit["a_cc"], episode, alpha_ep=cfg.alpha_ep)
    parts = dict(adv_history=credit["a_h"], adv_future=credit["a_f"], adv_context=credit["a_cc"], adv_episode=episode)
    parts |= dict(adv=adv, fallback=credit["fallback"])
    return {name: torch.as_tensor(x, dtype=torch.float32)[:, None] for name, x in parts.items()}


def pre_update(logp: Tensor, batch: dict, cfg: Config) -> Tensor:
    """Nothing to sum over the mini-batch before its loss."""
    return torch.zeros(0, dtype=torch.float64, device=logp.device)


def denominators(batch: dict, cfg: Config) -> dict:
    """What the means of `loss` divide by: counts of one micro-batch, to be summed over the mini-batch."""
    tokens = batch["mask"].sum()
    return {"policy": tokens, "kl": tokens}


def loss(out: dict, batch: dict, cfg: Config, *, pre: Tensor, denom: dict) -> tuple[Tensor, dict]:
    """This micro-batch's share of the mini-batch loss: clipped surrogate, KL penalty and entropy bonus, each a token mean.

    out: logp, entropy (N, L) of the policy; whatever stands in masked cells is taken out first. denom: the summed
    `denominators`. Returns the scalar and {metric: (sum, count)}; a metric that ends in /max is reduced by maximum instead.
    """
    mask, zero = _mask(batch["mask"]), batch["logp_old"].new_zeros(())
    denom = {name: count.clamp(min=1) for name, count in denom.items()}
    logp, logp_old, entropy = (torch.where(mask, x, zero) for x in (out["logp"], batch["logp_old"], out["entropy"]))
    adv = torch.where(mask, batch["adv"].expand_as(logp), zero)
    per_token, w = dual_clip_loss(logp - logp_old, adv, eps=cfg.eps, c=cfg.dual_clip), _exp((logp - logp_old).detach())
    total, tokens = per_token.sum() / denom["policy"], mask.sum()
    metrics = {
        "policy/loss": (per_token.sum(), tokens),
        "policy/entropy": (entropy.sum(), tokens),
        "policy/ratio": (w[mask].sum(), tokens),
        "policy/ratio/max": (w[mask].max() if mask.any() else zero, None),
        "policy/clip_frac": ((w.clamp(1 - cfg.eps, 1 + cfg.eps) * adv < w * adv).sum(), tokens),
        "policy/dual_clip_frac": (((adv < 0) & (w > cfg.dual_clip)).sum(), tokens),
    }
    if cfg.kl_coef:
        kl = kl_penalty(logp, torch.where(mask, batch["logp_ref"], zero))
        total = total + cfg.kl_coef * kl.sum() / denom["kl"]
        metrics["policy/kl"] = (kl.sum(), tokens)
    if cfg.entropy_coef:
        total = total - cfg.entropy_coef * entropy.sum() / denom["kl"]
    real = mask.any(1)
    for name in ("adv_history", "adv_future", "adv_context", "adv_episode", "fallback"):  # mean size over the steps
        if name in batch:
            metrics[f"credit/{name.removeprefix('adv_')}"] = (batch[name][real].abs().sum(), real.sum())
    return total, {k: (a.detach(), b) for k, (a, b) in metrics.items()}


# ----------------------------------------------------------------------------------------------------------- helpers


def _exp(log_w: Tensor) -> Tensor:
    # Paper silent: log-ratios are clamped to [-20, 20] before exp.
    return log_w.clamp(-20, 20).exp()


def _norms(x) -> np.ndarray:
    return np.sqrt(np.einsum("nd,nd->n", x, x))[:, None]


def _unit(x) -> np.ndarray:
    return x / np.maximum(_norms(x), 1e-9)


def _distances(x) -> np.ndarray:
    """Distances between the rows of x, (m, f) -> (m, m), exactly 0 between equal rows.

    A Gram matrix is fast but off by up to 3e-8 near 0, more than the floor of the bandwidth: those pairs take differences.
    """
    gram = x @ x.T
    square = np.diag(gram)
    distance = np.sqrt(np.maximum(square[:, None] + square - 2 * gram, 0.0))
    np.fill_diagonal(distance, 0.0)
    near = np.triu(distance < 1e-6, 1)
    for a in np.flatnonzero(near.any(1)):
        b = np.flatnonzero(near[a])
        distance[a, b] = distance[b, a] = _norms(x[b] - x[a])[:, 0]
    return distance


def _tied(x) -> bool:
    # Paper silent: a group whose values are equal, up to float residue, gives exactly 0.
    return len(x) < 2 or x.max() - x.min() <= 1e-12 * max(1.0, np.abs(x).max())


def _standardize(x, *, divide: bool = True) -> np.ndarray:
    """(x - mean) / (sample std + 1e-6), or x - mean; 0 for fewer than two values or equal ones."""
    if _tied(x):
        return np.zeros_like(x)
    return (x - x.mean()) / (x.std(ddof=1) + 1e-6 if divide else 1.0)


def _groups(ids) -> list[np.ndarray]:
    """Indices of each distinct id, ascending."""
    order = np.argsort(ids, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(ids[order])) + 1)


def _unique_steps(*, task, traj, step, obs, **numbers) -> tuple[dict, np.ndarray]:
    """Each (trajectory, step) once, sorted: {column: (n, ...)} with `length` T and obs as integers; and the place of each
    row's step among them, (N,). ValueError, with its task, trajectory and step, for a row that cannot be right."""
    codes = {}
    columns = {name: np.array(_list(x)) for name, x in (("task", task), ("traj", traj), ("step", step))}
    columns["obs"] = np.array([codes.setdefault(o, len(codes)) for o in obs])
    columns |= {name: _numbers(x, 1 + (name == "hidden")) for name, x in numbers.items() if x is not None}
    assert len({len(x) for x in columns.values()}) == 1, {name: len(x) for name, x in columns.items()}
    _, first, copies = np.unique(np.stack([columns["traj"], columns["step"]], 1), axis=0, return_index=True, return_inverse=True)
    unique, copies = {name: x[first] for name, x in columns.items()}, copies.reshape(-1)

    def refuse(rows, columns, what):
        for n in rows[:1]:
            raise ValueError(f"task {columns['task'][n]}, trajectory {columns['traj'][n]}, step {columns['step'][n]}: {what}.")

    again = np.flatnonzero(first[copies] != np.arange(len(copies)))
    for name, x in columns.items():
        flat = x.reshape(len(x), -1)
        refuse(np.flatnonzero(~np.isfinite(flat).all(1)), columns, f"{name} is not finite")
        # Paper silent: copies of a step have to agree in everything, the hidden state included.
        refuse(again[(flat[again] != flat[first[copies[again]]]).any(1)], columns, f"copies of this step disagree on {name}")
    _, start, length = np.unique(unique["traj"], return_index=True, return_counts=True)
    start, unique["length"] = np.repeat(start, length), np.repeat(length, length)
    refuse(np.flatnonzero(unique["step"] != np.arange(len(start)) - start), unique, "a step before this one is missing")
    for name in ("task", "outcome"):
        refuse(np.flatnonzero(unique[name] != unique[name][start]), unique, f"{name} is not that of the trajectory's first step")
    return unique, copies


def _numbers(x, ndim: int) -> np.ndarray:
    x = x.detach().double().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=np.float64)
    assert x.ndim == ndim, f"expected {ndim} dimensions, the first over rows, got shape {x.shape}"
    return x


def _mask(mask) -> Tensor:
    mask = torch.as_tensor(mask)
    assert mask.dtype == torch.bool and mask.ndim == 2, f"mask must be bool (N, L), got {mask.dtype} {tuple(mask.shape)}"
    return mask


def _list(x) -> list[int]:
    return [int(v) for v in (x.tolist() if hasattr(x, "tolist") else x)]


def example() -> None:
    """Two trajectories of one task; gamma = 1/2 keeps the numbers short."""
    traj, step = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
    observations = ["hall", "kitchen", "hall", "hall", "hall", "pantry"]
    outcome, invalid = [10.0, 10, 10, 0, 0, 0], [False, False, False, True, False, False]
    # They differ in three directions, which the projection removes: what is left of the contexts are the summaries.
    hidden = [[0, 0, 0, 1, 2, 3], [1, 0, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3], [1, 1, 0, 1, 2, 3], [0, 0, 1, 1, 2, 3], [1, 0, 1, 1, 2, 3]]
    rows = dict(task=[0] * 6, traj=traj, step=step, obs=observations, hidden=hidden, outcome=outcome, invalid=invalid)
    credit = contextual_credit(**rows, gamma=0.5)
    summary = np.concatenate([context_summary(observations[:3]), context_summary(observations[3:])])
    features, obs = context_features(hidden, summary), np.unique(observations, return_inverse=True)[1]
    peers = {}
    for queries, bucket, _ in peer_buckets(task=np.zeros(6, int), traj=traj, obs=obs):
        weights, _ = peer_weights(features, queries, bucket, traj=traj)
        for q, w in zip(queries, weights / weights.sum(1, keepdims=True), strict=True):
            peers[q] = "  ".join(f"{traj[v]},{step[v]}: {x:.3f}" for v, x in zip(bucket, w, strict=True) if traj[v] != traj[q])
    print("gamma = 0.5, eta = 0.1, K_F = 2; R = 10 and 0; the first action of trajectory 1 is invalid\n")
    print(f"traj step  observation |  tau_B  {'traj,step: share of each peer':34s}|      Y   B[Y]      V      dV |    C^H    C^F |      A")
    for n in range(6):
        c = {name: x[n] for name, x in credit.items()}
        place = f"{traj[n]:4d} {step[n]:4d}  {observations[n]:11s} | {c['tau']:6.4f}  {peers[n]:33s}"
        values = f"{c['return_target']:6.3f} {c['baseline']:6.3f} {c['value']:6.3f} {c['delta_value']:7.3f}"
        print(f"{place} | {values} | {c['historical']:6.3f} {c['future']:6.3f} | {c['a_cc']:6.3f}{'  fallback' if c['fallback'] else ''}")
    gain, nearer = split_change(credit["value"][3], credit["value"][5], gamma=0.5, h=2)
    print(f"""
By hand, trajectory 1, step 1 (Eqs. 3 to 7): it was in the hall before, and so was trajectory 0 at steps 0 and 2.
  summaries c   0,0 and 1,0: 12 ones   0,2: 8 ones of the share 2/3 and the revisit   1,1: 6 ones of 1/2 and the revisit
  distances     |phi_u - phi_v|^2 = 2 - 2 (ones in common) / sqrt(ones of u x ones of v):
                to 0,0  sqrt(2 - 12 / sqrt(84)) = 0.8310    to 0,2  sqrt(2 - 14 / sqrt(63)) = 0.4860
  bandwidth     the six pairs of the hall: 0, 0.4860, 0.6786, 0.6786, 0.8310, 0.8310;  tau = 0.15 x 0.6786 = 0.1018
  weights       exp(-0.8310 / 0.1018) = 0.00028    exp(-0.4860 / 0.1018) = 0.00844;  shares 0.033 and 0.967
  credit        B[Y] = 0.033 x 2.5 + 0.967 x 10 = 9.756;  C^H = 0 - 9.756;  V = half of it, as Z = Y / 2 here
  change        trajectory 0, step 1:  t + 2 = T, so dV = R - V = 10
  its parts     trajectory 1, step 0:  dV = {gain + nearer:.3f} = {gain:.3f} gain + {nearer:.3f} for two steps nearer the end""")


if __name__ == "__main__":
    example()
