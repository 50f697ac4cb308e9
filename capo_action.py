"""CAPO: Critic-Guided Action-Aligned Policy Optimization (arXiv 2604.18401), in one file.

An LLM agent acts in turns. One *action* is one complete reply a_t = (a_{t,1} .. a_{t,L_t}), reasoning, tool call and
end token included, sampled from the prompt s_t that describes the state. PPO assigns credit, ratio and clip to single
tokens; CAPO aligns all three with the action, which is what the environment sees:

  credit   one value V(s_t) per action, read at the last prompt token, and GAE over actions instead of tokens
  ratio    one importance ratio per action; its log is the batch drift mu plus the action's deviation from it, scaled
           by 1/sqrt(L) so that its spread does not depend on how long the action is
  clip     one decision per action

Symbols
  t, T       action index in a trajectory, number of actions          i, L_t   token index in an action, its length
  r_t        reward of action t                                       V_t      critic's value of the state before it
  gamma, lam discount and GAE parameter per action                    A_t, G_t advantage and return of action t
  z_{t,i}    log pi_theta(a_{t,i}) - log pi_old(a_{t,i})              mu       token mean of z over the mini-batch
  w_t        importance ratio of the action                           eps, B   clip range, actions in the mini-batch

Equations
  Eq. (delta)    action_gae       delta_t = r_t + gamma V_{t+1} - V_t, V_T = 0
  Eq. (GAE)      action_gae       A_t = sum_l (gamma lam)^l delta_{t+l},  G_t = A_t + V_t
  Eq. (center)   center           mu = stopgrad( sum_{t,i} z_{t,i} / sum_t L_t )
  Eq. (ratio)    action_ratio     w_t = exp( mu + L_t^-alpha sum_i (z_{t,i} - mu) ),  alpha = 1/2
  Eq. (loss)     policy_loss      -(1/B) sum_t min( w_t A_t, clip(w_t, 1-eps, 1+eps) A_t )
  Eq. (value)    value_loss       1/2 max( (V-G)^2, (clip(V, V_old-c, V_old+c) - G)^2 )
  Eq. (KL)       kl_penalty       exp(l) - l - 1,  l = log pi_ref - log pi_theta

Choices
  - Differs from paper: the KL is a mean over the tokens of the mini-batch, not over rows of each row's token mean.
  - Paper silent: whitening counts each action once; fewer than two actions, or all equal, give zeros.
  - Paper silent: mu is taken over the whole optimiser mini-batch, all micro-batches and ranks.
  - Paper silent: the KL estimate of a token is at most 10; beyond that it no longer pulls.
  - Paper silent: log-ratios are clamped to [-20, 20] before exp.
  - Paper silent: a truncated trajectory ends with V_T = 0 unless the caller supplies V(s_T).
  - Paper silent: under credit=token an action ratio takes the mean of its tokens' advantages.
  - Paper silent: an action without tokens has loss 0 and no place in B; token credit moves its reward to the token before.

Run `python capo_action.py` for a worked example, `torchrun --nproc_per_node=2 train.py --algo capo_action` to train.
This file needs torch and the standard library only; copy it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------- settings


@dataclass
class Config:
    gamma: float = 0.99  # discount per action [authors]
    lam: float = 1.0  # GAE lambda per action [authors]
    alpha: float = 0.5  # length exponent of the ratio, 1/2 in the paper [paper]
    eps: float = 0.001  # clip range of the action ratio [paper]
    token_eps: float = 0.2  # clip range of ratio=token, plain PPO [authors]
    dual_clip: float = 3.0  # dual clip of ratio=token [authors]
    value_clip: float = 0.5  # clip range of the value update [authors]
    kl_coef: float = 0.001  # weight of the KL penalty to the starting policy; 0 runs without a reference [authors]
    entropy_coef: float = 0.0  # weight of the entropy bonus [authors]
    ratio: Literal["action", "sqrt", "mean", "product", "token"] = "action"  # importance ratio; the others are ablations [paper]
    credit: Literal["action", "token"] = "action"  # one value and advantage per action, or per token as in PPO [paper]
    bootstrap_truncated: bool = False  # V(s_T) instead of 0 at the end of a truncated trajectory, where its prompt fits [ours]
    critic_warmup: int = 0  # first iterations that train the critic alone [authors]

    def __post_init__(self):
        at_most_1 = ("gamma", "lam")
        any_size = ("alpha", "eps", "token_eps", "value_clip", "kl_coef", "entropy_coef", "critic_warmup")
        for names, low, high in ((at_most_1, 0, 1), (any_size, 0, float("inf")), (("dual_clip",), 1, float("inf"))):
            for name in names:
                if not low <= getattr(self, name) <= high:
                    raise ValueError(f"{name} {getattr(self, name)}: give a number from {low} to {high}.")

    @property
    def value_at(self) -> str:
        """Where the critic is read: "state" = the last prompt token alone, "tokens" = before each response token."""
        return "tokens" if "token" in (self.credit, self.ratio) else "state"

    @property
    def clip_width(self) -> float:
        return self.token_eps if self.ratio == "token" else self.eps


NEEDS = ("critic", "reference")

# Settings of the trainer per preset and environment; every one is a flag of train.py.
PRESETS = {
    "paper": {
        "alfworld": dict(
            model="Qwen/Qwen3-4B-Instruct-2507", style="tool_call", tasks=128, rollouts=1, minibatch=128, passes=1,
            lr=1e-6, critic_lr=1e-5, max_steps=20, history_length=2, prompt_tokens=8192, response_tokens=4096,
            iterations=135, temperature=1.0, success_reward=1.0, eval_temperature=0.0, eval_seed=41, eval_every=5,
            grad_checkpoint=True, micro_tokens=16384,
        ),
    },
    "mini": {
        "alfworld": dict(
            model="mini/agent", data="mini", style="think_action", tasks=64, rollouts=1, minibatch=128, critic_minibatch=64, passes=1,
            lr=2e-4, lr_warmup=3, critic_lr=1e-3, gamma=0.95, lam=0.9, eps=0.02, kl_coef=0.01, critic_warmup=1, max_steps=10,
            history_length=2, prompt_tokens=448, response_tokens=48, iterations=45, temperature=1.0, success_reward=1.0,
            eval_temperature=0.4, eval_every=15,
        ),
    },
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ credit


def action_gae(*, rewards, values, traj, step, gamma: float, lam: float, bootstrap=None) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over actions.  Eq. (delta), Eq. (GAE)

    rewards, values, traj, step: (N,) one entry per action, rows in any order; the steps of a trajectory are 0..T-1.
    bootstrap: {trajectory id: V(s_T)} for truncated trajectories; all others end with V_T = 0.
    Returns advantages and returns, (N,) float64, returns before whitening. ValueError: a step missing or doubled.
    """
    rewards, values = _vector(rewards), _vector(values)
    advantages = torch.zeros_like(rewards)
    # Paper silent: a truncated trajectory ends with V_T = 0 unless the caller supplies V(s_T).
    bootstrap = bootstrap or {}
    for trajectory, rows in _trajectories(traj, step).items():
        next_value, next_advantage = float(bootstrap.get(trajectory, 0.0)), 0.0
        for n in reversed(rows):
            delta = float(rewards[n]) + gamma * next_value - float(values[n])  # Eq. (delta)
            next_advantage = delta + gamma * lam * next_advantage  # Eq. (GAE), as a recursion from the last action
            next_value = float(values[n])
            advantages[n] = next_advantage
    return advantages, advantages + values


def token_gae(
    *, rewards, values, mask, traj, step, gamma: float = 0.99, lam: float = 1.0, bootstrap=None
) -> tuple[Tensor, Tensor]:
    """GAE over the concatenated response tokens of each trajectory: the credit of PPO, for the ablation.

    rewards, traj, step: (N,); values, mask: (N, L), values[n, i] is read at the token before response token i.
    The reward of a step sits on its last token; tokens of prompts and observations are skipped without a discount.
    bootstrap: {trajectory id: V(s_T)} as in `action_gae`.
    Returns advantages and returns, (N, L) float64, 0 where mask is False.
    """
    rewards, mask = _vector(rewards), _mask(mask)
    values = torch.where(mask, torch.as_tensor(values, dtype=torch.float64).detach().cpu(), 0.0)
    advantages = torch.zeros_like(values)
    for trajectory, rows in _trajectories(traj, step).items():
        next_value, next_advantage, reward = float((bootstrap or {}).get(trajectory, 0.0)), 0.0, 0.0
        for n in reversed(rows):
            reward += float(rewards[n])
            tokens = mask[n].nonzero().flatten()
            row_values = values[n, tokens].tolist()
            row_advantages = []
            # Paper silent: an action without tokens has loss 0 and no place in B; token credit moves its reward to the token before.
            for value in reversed(row_values):
                next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
                next_value, reward = value, 0.0
                row_advantages.append(next_advantage)
            advantages[n, tokens] = torch.tensor(row_advantages[::-1], dtype=torch.float64)
    return advantages, advantages + values


def whiten(x) -> Tensor:
    """(x - mean) / (sample std + 1e-8) over all entries of x, (N,); the returns are never whitened.

    Exactly 0 where max - min <= 1e-12 max(1, max|x|): such a batch holds no preference, only float residue.
    """
    x = _vector(x)
    # Paper silent: whitening counts each action once; fewer than two actions, or all equal, give zeros.
    if len(x) < 2 or x.max() - x.min() <= 1e-12 * max(1.0, float(x.abs().max())):
        return torch.zeros_like(x)
    return (x - x.mean()) / (x.std() + 1e-8)


# ------------------------------------------------------------------------------------------------------------- ratio


def center(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of the token log-ratios; mu is their quotient after summing both over the mini-batch.  Eq. (center)

    log_ratio, mask: (N, L). Returns two detached scalars: no gradient flows from one action into another through mu.
    """
    # Paper silent: mu is taken over the whole optimiser mini-batch, all micro-batches and ranks.
    mask = _mask(mask)
    z = torch.where(mask, log_ratio.detach(), 0.0).double()
    return z.sum(), mask.sum()


def action_ratio(log_ratio: Tensor, mask: Tensor, *, mu, alpha: float = 0.5, kind: str = "action") -> Tensor:
    """Importance ratio w_t of each action.  Eq. (ratio)

    log_ratio, mask: (N, L); mu: scalar, detached. Returns (N,). The other kinds are the paper's ablation:
    sqrt = exp(L^-1/2 sum z), mean = exp(sum z / L) as in GSPO, product = exp(sum z).
    """
    mask = _mask(mask)
    length = mask.sum(1).clamp(min=1).to(log_ratio.dtype)  # (N,)
    if kind == "action":
        deviation = torch.where(mask, log_ratio - mu, 0.0).sum(1)  # (N,)
        log_w = mu + length**-alpha * deviation
    else:
        power = {"sqrt": -0.5, "mean": -1.0, "product": 0.0}[kind]
        log_w = length**power * torch.where(mask, log_ratio, 0.0).sum(1)
    return _exp(log_w)


# -------------------------------------------------------------------------------------------------------------- loss


def policy_loss(log_ratio, mask, advantages, *, mu, eps: float = 1e-3, alpha: float = 0.5, kind: str = "action"):
    """Clipped surrogate with one ratio, one clip decision and one term per action.  Eq. (loss), before the mean over B

    log_ratio, mask: (N, L); advantages: (N,). Returns the loss per action (N,) and where the clip acts (N,) bool.
    """
    real = _mask(mask).any(1)
    w = action_ratio(log_ratio, mask, mu=mu, alpha=alpha, kind=kind)
    adv = torch.where(real, torch.as_tensor(advantages, dtype=w.dtype, device=w.device), 0.0)
    unclipped, clipped = w * adv, w.clamp(1 - eps, 1 + eps) * adv
    return torch.where(real, -torch.minimum(unclipped, clipped), 0.0), real & (clipped < unclipped)


def token_loss(log_ratio: Tensor, advantages: Tensor, *, eps: float = 0.2, c: float = 3.0) -> Tensor:
    """PPO's clipped loss with dual clip, per token: ratio=token. All of shape (N, L); finite input expected."""
    w = _exp(log_ratio)
    clipped = torch.minimum(w * advantages, w.clamp(1 - eps, 1 + eps) * advantages)
    return -torch.where(advantages < 0, torch.maximum(clipped, c * advantages), clipped)


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, *, clip: float = 0.5) -> Tensor:
    """Clipped value loss per row: the worse of the free and the clipped prediction.  Eq. (value)  Any one shape."""
    clipped = torch.clamp(values, values_old - clip, values_old + clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def kl_penalty(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Low-variance estimate of KL(pi_theta || pi_ref) per token, in the loss and never in the reward.  Eq. (KL)"""
    l = (logp_ref - logp).clamp(-20, 20)  # noqa: E741
    # Paper silent: the KL estimate of a token is at most 10; beyond that it no longer pulls.
    return (l.exp() - l - 1).clamp(max=10)


# ------------------------------------------------------------------------------------------ what the training loop calls


def advantages(batch: dict, cfg: Config) -> dict:
    """Credit of every row of an iteration, all ranks together.

    batch: traj, step, reward, truncated (N,); value (N, 1 or L), column 0 read at the last prompt token; mask (N, L); with
    bootstrap_truncated also bootstrap, {trajectory id: V(s_T)}.
    Returns adv and ret, float32: (N, 1) for credit=action, the advantage shared by all tokens of the action, or (N, L).
    """
    order = dict(traj=batch["traj"], step=batch["step"], gamma=cfg.gamma, lam=cfg.lam)
    value, mask = torch.as_tensor(batch["value"]), _mask(batch["mask"])
    if cfg.bootstrap_truncated:
        truncated = {i for i, cut in zip(_list(batch["traj"]), batch["truncated"], strict=True) if cut}
        order["bootstrap"] = {i: v for i, v in batch["bootstrap"].items() if i in truncated}
    if cfg.credit == "token":
        adv, ret = token_gae(rewards=batch["reward"], values=value, mask=mask, **order)
        adv[mask] = whiten(adv[mask])
        return {"adv": adv.float(), "ret": ret.float()}
    adv, ret = action_gae(rewards=batch["reward"], values=value[:, 0], **order)
    return {"adv": whiten(adv).float()[:, None], "ret": ret.float()[:, None]}


def pre_update(logp: Tensor, batch: dict, cfg: Config) -> Tensor:
    """[sum of z, tokens] of one micro-batch, to be summed over the mini-batch for mu; empty where no mu is needed."""
    if cfg.ratio != "action":
        return torch.zeros(0, dtype=torch.float64, device=logp.device)
    return torch.stack(center(logp - batch["logp_old"], batch["mask"])).double()


def denominators(batch: dict, cfg: Config) -> dict:
    """What the means of `loss` divide by: counts of one micro-batch, to be summed over the mini-batch."""
    tokens, rows = batch["mask"].sum(), batch["mask"].any(1).sum()
    return {
        "policy": tokens if cfg.ratio == "token" else rows,
        "kl": tokens,
        "value": tokens if cfg.value_at == "tokens" else rows,
    }


def loss(out: dict, batch: dict, cfg: Config, *, pre: Tensor, denom: dict) -> tuple[Tensor, dict]:
    """This micro-batch's share of the mini-batch loss.

    out: logp, entropy (N, L) of the policy and / or value (N, 1 or L) of the critic: the parts given are the parts
    returned. pre: the summed `pre_update`; denom: the summed `denominators`.
    Returns the scalar and {metric: (sum, count)}; a metric that ends in /max is reduced by maximum instead.
    """
    total, metrics = batch["logp_old"].new_zeros(()), {}
    denom = {name: count.clamp(min=1) for name, count in denom.items()}
    for name, part in (("logp", _policy_part), ("value", _value_part)):
        if name in out:
            share, measured = part(out, batch, cfg, pre, denom)
            total, metrics = total + share, metrics | measured
    return total, {k: (a.detach(), b) for k, (a, b) in metrics.items()}


def _policy_part(out, batch, cfg, pre, denom):
    """Clipped surrogate, KL penalty and entropy bonus; whatever stands in masked cells is taken out first."""
    mask, zero = _mask(batch["mask"]), batch["logp_old"].new_zeros(())
    logp, logp_old, entropy = (torch.where(mask, x, zero) for x in (out["logp"], batch["logp_old"], out["entropy"]))
    mu = (pre[0] / pre[1].clamp(min=1)).to(zero.dtype) if len(pre) else zero
    per_term, w, clipped, real, length = _policy_terms(logp - logp_old, mask, batch["adv"], mu, cfg)
    total = per_term.sum() / denom["policy"]
    metrics = {
        "policy/loss": (per_term.sum(), real.sum()),
        "policy/entropy": (entropy.sum(), mask.sum()),
        "policy/ratio": (w[real].sum(), real.sum()),
        "policy/ratio/max": (w[real].max() if real.any() else zero, None),
        "policy/clip_frac": (clipped.sum(), real.sum()),
    }
    if len(pre):
        metrics["policy/mu"] = (mu * mask.sum(), mask.sum())
    if cfg.kl_coef:
        # Differs from paper: the KL is a mean over the tokens of the mini-batch, not over rows of each row's token mean.
        kl = kl_penalty(logp, torch.where(mask, batch["logp_ref"], zero))
        total = total + cfg.kl_coef * kl.sum() / denom["kl"]
        metrics["policy/kl"] = (kl.sum(), mask.sum())
    if cfg.entropy_coef:
        total = total - cfg.entropy_coef * entropy.sum() / denom["kl"]
    for low, high in ((1, 15), (16, 63), (64, 255), (256, 10**6)):  # does clipping depend on the action's length?
        inside = real & (length >= low) & (length <= high)
        metrics[f"policy/clip_frac/len_{low}-{high}"] = ((clipped & inside).sum(), inside.sum())
    return total, metrics


def _policy_terms(z, mask, adv, mu, cfg):
    """The terms of the surrogate, per action (N,), or per token (N, L) for ratio=token: the loss, the ratio, where the
    clip acts, which terms are real, and the length of the action."""
    length = mask.sum(1)
    if cfg.ratio == "token":
        adv = torch.where(mask, adv.expand_as(z), 0.0)
        w = _exp(z.detach())
        clipped = w.clamp(1 - cfg.token_eps, 1 + cfg.token_eps) * adv < w * adv
        return token_loss(z, adv, eps=cfg.token_eps, c=cfg.dual_clip), w, clipped, mask, length[:, None].expand_as(mask)
    if cfg.credit == "token":
        # Paper silent: under credit=token an action ratio takes the mean of its tokens' advantages.
        adv = torch.where(mask, adv, 0.0).sum(1, keepdim=True) / length.clamp(min=1)[:, None]
    kind = dict(mu=mu, alpha=cfg.alpha, kind=cfg.ratio)
    per_action, clipped = policy_loss(z, mask, adv[:, 0], eps=cfg.eps, **kind)
    return per_action, action_ratio(z.detach(), mask, **kind), clipped, mask.any(1), length


def _value_part(out, batch, cfg, pre, denom):
    """Clipped value loss over states, or over tokens where the critic is read at each."""
    real = batch["mask"] if cfg.value_at == "tokens" else batch["mask"].any(1, keepdim=True)
    v, v_old, ret = (torch.where(real, x.expand(real.shape), 0.0) for x in (out["value"], batch["value_old"], batch["ret"]))
    per_row = value_loss(v, v_old, ret, clip=cfg.value_clip)
    return per_row.sum() / denom["value"], {"critic/loss": (per_row.sum(), real.sum())}


# ----------------------------------------------------------------------------------------------------------- helpers


def _exp(log_w: Tensor) -> Tensor:
    # Paper silent: log-ratios are clamped to [-20, 20] before exp.
    return log_w.clamp(-20, 20).exp()


def _vector(x) -> Tensor:
    x = torch.as_tensor(x, dtype=torch.float64).detach().cpu()
    assert x.ndim == 1, f"expected one value per row, got shape {tuple(x.shape)}"
    return x


def _mask(mask) -> Tensor:
    mask = torch.as_tensor(mask)
    assert mask.dtype == torch.bool and mask.ndim == 2, f"mask must be bool (N, L), got {mask.dtype} {tuple(mask.shape)}"
    return mask


def _trajectories(traj, step) -> dict[int, list[int]]:
    """{trajectory id: its row numbers in step order}"""
    rows: dict[int, dict[int, int]] = {}
    for n, (i, t) in enumerate(zip(_list(traj), _list(step), strict=True)):
        if rows.setdefault(i, {}).setdefault(t, n) != n:
            raise ValueError(f"trajectory {i} has step {t} twice; give each action once")
    for i, steps in rows.items():
        if set(steps) != set(range(len(steps))):
            raise ValueError(f"trajectory {i} has steps {sorted(steps)}; give all of 0..{max(steps)}")
    return {i: [steps[t] for t in range(len(steps))] for i, steps in rows.items()}


def _list(x) -> list[int]:
    return [int(v) for v in (x.tolist() if hasattr(x, "tolist") else x)]


def example() -> None:
    """Two trajectories by hand: lengths 1, 4, 9 have roots 1, 2, 3; gamma = 1/2 and eps = 0.05 keep the numbers short."""
    traj, step, reward, value = [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [0.0, 0, 1, 0, 0], [0.2, 0.3, 0.5, 0.2, 0.1]
    z_rows = [[0.02] * 4, [0.0], [0.03] * 9, [-0.02] * 4, [0.06] * 1]
    length = max(map(len, z_rows))
    mask = torch.tensor([[i < len(z) for i in range(length)] for z in z_rows])
    z = torch.tensor([z + [0.0] * (length - len(z)) for z in z_rows], dtype=torch.float64)
    adv, ret = action_gae(rewards=reward, values=value, traj=traj, step=step, gamma=0.5, lam=1.0)
    white = whiten(adv)
    total, count = center(z, mask)
    mu = total / count
    w = action_ratio(z, mask, mu=mu)
    per_action, clipped = policy_loss(z, mask, white, mu=mu, eps=0.05)
    print("gamma = 0.5, lam = 1, alpha = 1/2, eps = 0.05")
    print(f"mu = {total:.4f} / {count} tokens = {mu:.6f}\n")
    print("traj step  r_t    V_t |    A_t    G_t  whitened |  L  sum z  log w_t     w_t  clip |     loss")
    for n, z_row in enumerate(z_rows):
        credit = f"{traj[n]:4d} {step[n]:4d} {reward[n]:4.1f} {value[n]:6.3f} | {adv[n]:6.3f} {ret[n]:6.3f} {white[n]:9.5f}"
        ratio = f"{len(z_row):2d} {sum(z_row):6.3f} {w[n].log():8.5f} {w[n]:7.5f} {'yes' if clipped[n] else 'no':>5s}"
        print(f"{credit} | {ratio} | {per_action[n]:8.5f}")
    print(f"\nloss = mean over {len(traj)} actions = {per_action.mean():.6f}\n")
    print("By hand, trajectory 0, last step:  delta = 1 - 0.5 = 0.5 = A;  G = A + V = 1")
    print("                       step 1:     delta = 0 + 0.5 x 0.5 - 0.3 = -0.05;  A = -0.05 + 0.5 x 0.5 = 0.2")
    print("the last action has 9 tokens:      log w = mu + (0.27 - 9 mu) / 3 = 0.09 - 2 mu = 0.055263")
    print("and A > 0, w > 1 + eps, so it is clipped: loss = -(1 + eps) x whitened A")


if __name__ == "__main__":
    example()
