"""Train an LLM agent:  torchrun --nproc_per_node=8 train.py --algo capo_action

Without a GPU the preset `mini` trains the small agent that ships with the project, on games that the project makes
itself; with GPUs the preset `paper` takes the paper's model and settings. `--preset` forces one, every setting is a flag.
One iteration, as in the papers' algorithm boxes (`main`):

  1. sample trajectories with the current policy                     rollout.py
  2. log-probs, values and reference log-probs at those weights      score
  3. credit over the whole batch, all ranks                          <algo>.advantages
  4. mini-batch updates                                              update
  5. new weights to the engine, metrics, evaluation, checkpoint

Every rank holds all rows of an iteration (ids and numbers, a few MB) and computes its own share of each mini-batch, so
plans and denominators are the same everywhere. Nothing random outlives an iteration: tasks, permutations and sampling
seeds are functions of (seed, iteration, ...), which is why a resumed run equals an unbroken one.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import inspect
import json
import os
import re
import resource
import signal
import sys
import time
import typing
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

import analyze
import envs
import eval as evaluation
import rollout
from envs import UserError
from model import (
    Critic,
    Policy,
    Ranks,
    build,
    collate,
    critic_out,
    end_tokens,
    export,
    full_weights,
    load_checkpoint,
    model_path,
    plan_pass,
    policy_out,
    save_checkpoint,
    tokenizer_and_context,
)

ALGORITHMS = ("capo_action", "ccpo_context")  # modules with the same few names: Config, NEEDS, PRESETS, advantages, ..., loss

# ---------------------------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Settings:
    model: str = ""  # hub name or folder with weights, tokenizer and chat template
    data: str = ""  # data folder of the environment; empty: its usual place; "mini": made by the project
    out: str = ""  # output folder; empty: runs/<algo>-<env>-<time>
    seed: int = 41  # of tasks, permutations and sampling
    iterations: int = 100  # rollout-and-update rounds
    style: typing.Literal["think_action", "tool_call"] = "think_action"  # prompt style
    tasks: int = 16  # different tasks per iteration
    rollouts: int = 8  # trajectories per task
    minibatch: int = 256  # rows (actions) per optimiser step, all ranks together
    critic_minibatch: int = 0  # rows per optimiser step of the critic; 0: the same
    passes: int = 1  # passes over the rows of an iteration
    lr: float = 1e-6  # learning rate of the policy, constant after the warm-up
    lr_warmup: int = 0  # iterations in which the policy trains at a lower rate, rising in a line to lr
    critic_lr: float = 1e-5  # learning rate of the critic, constant
    weight_decay: float = 0.01  # of AdamW
    grad_clip: float = 1.0  # maximum gradient norm, policy and critic each
    temperature: float = 1.0  # of rollouts; log-probs are taken at the same temperature
    top_p: float = 1.0  # of rollouts; below 1 the ratio is biased
    max_steps: int = 0  # actions per trajectory, then it is truncated; 0: the environment's usual number
    history_length: int = 2  # earlier observation/action pairs in the prompt
    prompt_tokens: int = 2048  # longest prompt
    response_tokens: int = 512  # longest reply
    success_reward: float = 1.0  # scale of the environment's reward
    invalid_reward: float = 0.0  # added to the reward of an invalid action
    eval_every: int = 5  # iterations between evaluations; one more before the first and after the last
    eval_split: str = "valid_unseen"  # split of the evaluation
    eval_tasks: int = 0  # number of its tasks, 0 for all
    eval_temperature: float = 0.4  # 0 is greedy
    eval_seed: int = 1000  # sampling seeds of evaluations, the same before and after training
    save_every: int = 10  # iterations between checkpoints; one more after the last
    log_rows: bool = False  # write each iteration's rows with their credit to OUT/rows, for analyze.py
    engine: typing.Literal["auto", "vllm", "transformers"] = "auto"  # auto: vllm where it is installed
    gpu_memory: float = 0.4  # share of a GPU's memory for vLLM
    micro_tokens: int = 32768  # tokens per forward pass and rank
    logit_chunk: int = 2048  # response positions whose logits exist at once
    grad_checkpoint: bool = False  # recompute activations in the backward pass
    workers: int = 1  # environment processes per rank
    slots: int = 0  # live environments per rank; 0: all trajectories of the rank at once, at most 64
    deadline: float = 120.0  # seconds an environment may take to answer
    deterministic: bool = False  # turns in lock-step and fixed batches: runs repeat exactly


def fields_with_help(cls) -> dict[str, tuple[dataclasses.Field, str]]:
    """{name: (field, help)}: the help line is the comment behind the field."""
    helps = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE))
    return {f.name: (f, helps[f.name]) for f in dataclasses.fields(cls)}


def disagreement(name, value, run, theirs) -> str:
    return f"--{name} {value} disagrees with the run in {run}, which has {theirs}; leave the flag out or start a new run."


def parse(argv=None):
    """-> algo module, its Config, Settings, and the chosen names (algo, env, preset, why, resume)."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--algo", choices=ALGORITHMS, default=None, help="algorithm (default capo_action)")
    first.add_argument("--env", default=None, help="environment: alfworld, or module:Class (default alfworld)")
    first.add_argument("--preset", choices=("auto", "mini", "paper"), default=None, help="settings; auto: paper with a GPU, else mini")
    first.add_argument("--resume", metavar="RUN_DIR", default=None, help="continue that run in place from its last checkpoint")
    chosen, _ = first.parse_known_args(argv)

    saved = None
    if chosen.resume:
        path = Path(chosen.resume) / "config.json"
        if not path.exists():
            raise UserError(f"--resume {chosen.resume}: there is no config.json; give the folder of a run.")
        saved = json.loads(path.read_text())
        for name in ("algo", "env", "preset"):
            if getattr(chosen, name) not in (None, saved[name]):
                raise UserError(disagreement(name, getattr(chosen, name), chosen.resume, saved[name]))
            setattr(chosen, name, saved[name])
    chosen.algo, chosen.env = chosen.algo or "capo_action", chosen.env or "alfworld"
    gpu = torch.cuda.is_available()
    chosen.why = "as the run" if saved else "--preset" if chosen.preset in ("mini", "paper") else f"{'a' if gpu else 'no'} GPU is present"
    if chosen.preset in (None, "auto"):
        chosen.preset = "paper" if gpu else "mini"

    algo = importlib.import_module(chosen.algo)
    if saved:  # a run of an earlier version lacks the settings that are new since
        for part, defaults in (("settings", Settings()), ("config", algo.Config())):
            saved[part] = dataclasses.asdict(defaults) | saved[part]
    known = algo.PRESETS[chosen.preset]
    preset = known.get(chosen.env, known["alfworld"])
    if chosen.env not in known and not saved:
        chosen.why += "; the settings of alfworld, as there are none for this environment"
    parser = argparse.ArgumentParser(parents=[first], description=__doc__.split("\n")[0], allow_abbrev=False)
    for cls in (Settings, algo.Config):
        group = parser.add_argument_group(f"{cls.__module__}.{cls.__name__}".replace("__main__", "train"))
        for name, (field, text) in fields_with_help(cls).items():
            default = saved["settings" if cls is Settings else "config"][name] if saved else preset.get(name, field.default)
            kind = dict(type=field.type)
            if typing.get_origin(field.type) is typing.Literal:
                kind = dict(choices=typing.get_args(field.type))
            elif field.type is bool:
                kind = dict(action=argparse.BooleanOptionalAction)
            group.add_argument(f"--{name}", default=default, help=f"{text.replace('%', '%%')} (default {default})", **kind)
    args = vars(parser.parse_args(argv))
    settings = Settings(**{name: args[name] for name in fields_with_help(Settings)})
    try:
        cfg = algo.Config(**{name: args[name] for name in fields_with_help(algo.Config)})
    except ValueError as e:
        raise UserError(f"--{e}") from None
    if saved:
        for now, then in ((settings, saved["settings"]), (cfg, saved["config"])):
            for name, value in dataclasses.asdict(now).items():
                if value != then[name]:
                    raise UserError(disagreement(name, value, chosen.resume, then[name]))
        settings.out = chosen.resume
    return algo, cfg, settings, chosen


# ---------------------------------------------------------------------------------------------- the steps of the loop


@torch.no_grad()
def score(plan, rows, models, cfg, needs, ranks) -> dict:
    """logp_old, logp_ref, value and hidden of every row at the rollout weights, as far as needed, on every rank.

    Uses the micro-batches of the first pass, so that the ratio of its first mini-batch is exactly 1.
    """
    mine = {}
    for minibatch in plan:
        for picks in minibatch[ranks.rank]:
            batch = collate(rows, picks, {}, ranks.device)
            out = {"logp_old": policy_out(models["policy"], batch)["logp"]} if "policy" in models else {}
            if "reference" in models:
                reference = policy_out(models["reference"], batch)
                out |= {"logp_ref": reference["logp"]} | ({"hidden": reference["hidden"]} if "hidden" in needs else {})
            if "critic" in models:
                out["value"] = out["value_old"] = critic_out(models["critic"], batch, cfg.value_at)["value"]
            out = {name: x.cpu().numpy() for name, x in out.items()}
            for k, row in enumerate(picks):
                length = len(rows[row].response_ids)
                mine[row] = {name: x[k] if name == "hidden" else x[k, :length] for name, x in out.items()}
    everyone = {row: values for part in ranks.gather(mine) for row, values in part.items()}
    return {name: [everyone[row][name] for row in range(len(rows))] for name in everyone[0]}


def last_values(trajectories, s: Settings, models, cfg, ranks) -> dict:
    """{trajectory id: V(s_T)} of the truncated trajectories, for `bootstrap_truncated`."""
    cut = [t for t in trajectories if t.last_prompt is not None]
    if not cut:
        return {}
    empty = np.zeros(1, np.int32)  # the critic reads the prompt alone
    states = [rollout.Row(t.group, t.traj, t.steps, t.last_prompt, empty, empty, "", "", 0.0, False, "", {}) for t in cut]
    plan = plan_pass([len(t.last_prompt) for t in cut], size=len(cut), world=ranks.world, budget=s.micro_tokens, seed=(0,))
    values = score(plan, states, {"critic": models["critic"]}, cfg, (), ranks)["value"]
    return {t.traj: float(v[0]) for t, v in zip(cut, values, strict=True)}


def as_batch(rows, trajectories, columns) -> dict:
    """The global batch that `advantages` reads: one entry per row, ragged token columns padded to (N, L)."""
    trajectory = {t.traj: t for t in trajectories}
    width = max(len(r.response_ids) for r in rows)

    def pad(column):
        out = torch.zeros(len(rows), max(map(len, column)), dtype=torch.float64)
        for n, x in enumerate(column):
            out[n, : len(x)] = torch.as_tensor(x)
        return out

    return {
        "group": [r.group for r in rows],
        "traj": [r.traj for r in rows],
        "step": [r.step for r in rows],
        "reward": [r.reward for r in rows],
        "invalid": [r.invalid for r in rows],
        "obs": [r.observation for r in rows],
        "outcome": [trajectory[r.traj].outcome for r in rows],
        "truncated": [trajectory[r.traj].truncated for r in rows],
        "info": [r.info for r in rows],
        "prompt_ids": [r.prompt_ids for r in rows],
        "mask": torch.arange(width) < torch.tensor([len(r.response_ids) for r in rows])[:, None],
        **{name: pad(column) for name, column in columns.items()},
    }


def per_row(credit: dict, rows) -> dict:
    """(N, 1) and (N, L) tensors as one array per row, without the padding."""
    return {name: [x[n, : len(r.response_ids)].numpy() for n, r in enumerate(rows)] for name, x in credit.items()}


def learning_rate(s: Settings, cfg, number: int) -> float:
    """Of the policy in an iteration. AdamW's first steps are as long as any, whatever the gradient: hence the rise."""
    return s.lr * min(1.0, (number - getattr(cfg, "critic_warmup", 0)) / (s.lr_warmup + 1))


def mini_batch_sums(algo, cfg, micro, logps, ranks):
    """The mini-batch's `pre_update` (empty without logps: for a critic) and `denominators`, summed over micro-batches and ranks."""
    counts = [algo.denominators(batch, cfg) for batch in micro]
    pre = [algo.pre_update(logp, batch, cfg) for logp, batch in zip(logps, micro, strict=bool(logps))]
    names = sorted(counts[0])
    sums = ranks.sum(torch.cat([torch.stack([sum(c[name] for c in counts) for name in names]).double(), *([sum(pre)] if pre else [])]))
    return sums[len(names) :], {name: sums[i].clamp(min=1).float() for i, name in enumerate(names)}


def update(part: str, plans, rows, columns, model, optimizer, algo, cfg, grad_clip: float, ranks: Ranks) -> dict:
    """All passes and mini-batches of an iteration for one model: part is "policy" or "critic".

    Returns {metric: value}, reduced over micro-batches and ranks.
    """

    def forward(batch):
        return policy_out(model, batch) if part == "policy" else critic_out(model, batch, cfg.value_at)

    measured, norms = [], []
    for minibatch in (m for plan in plans for m in plan):
        micro = [collate(rows, picks, columns, ranks.device) for picks in minibatch[ranks.rank]]
        outs = [forward(micro[0])] if len(micro) == 1 else []
        logps = [batch["logp_old"] for batch in micro] if part == "policy" else []
        if logps and norms and algo.pre_update(logps[0], micro[0], cfg).numel():
            # Before the first step z is 0; from then on `pre_update` needs the log-probs of now: those at hand, or a pass of its own.
            with torch.no_grad():
                logps = [out["logp"].detach() for out in outs or map(forward, micro)]
        pre, denom = mini_batch_sums(algo, cfg, micro, logps, ranks)
        for batch in micro:
            out = outs.pop() if outs else forward(batch)
            loss, metrics = algo.loss(out, batch, cfg, pre=pre, denom=denom)
            if not norms and "policy/ratio/max" in metrics:  # nothing is trained yet: what moves a ratio from 1 is noise
                metrics["policy/ratio/noise"] = (metrics["policy/ratio/max"][0] - 1, None)
            (loss * ranks.world).backward()  # FSDP averages gradients over ranks; the denominators are global already
            measured.append(metrics)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), grad_clip).full_tensor().item())
        if np.isfinite(norms[-1]):
            optimizer.step()
        optimizer.zero_grad()
    metrics = reduce_metrics(ranks.gather([{k: (float(a), None if b is None else float(b)) for k, (a, b) in m.items()} for m in measured]))
    finite = [x for x in norms if np.isfinite(x)]
    return metrics | {f"{part}/grad_norm": float(np.mean(finite)) if finite else 0.0, f"{part}/steps_skipped": len(norms) - len(finite)}


def reduce_metrics(parts) -> dict:
    """(sum, count) pairs of all ranks and micro-batches to means; (value, None) pairs to their maximum."""
    totals = {}
    for name, (a, b) in (item for part in parts for measured in part for item in measured.items()):
        total, count = totals.get(name, (-np.inf, None) if b is None else (0.0, 0.0))
        totals[name] = (max(total, a), None) if b is None else (total + a, count + b)
    return {name: a if b is None else a / max(b, 1.0) for name, (a, b) in totals.items()}


def described(chosen, s: Settings, cfg=None) -> dict:
    names = {"algo": chosen.algo, "env": chosen.env, "preset": chosen.preset}
    return names | {"settings": dataclasses.asdict(s)} | ({"config": dataclasses.asdict(cfg)} if cfg else {})


# ------------------------------------------------------------------------------------------------------------ metrics


def describe_rollouts(rows, trajectories) -> dict:
    names = {"success", "steps", "truncated", "failed", "invalid", "revisits", "reply_tokens", "prompt_tokens"}
    result = {f"train/{k}": v for k, v in evaluation.summary(rows, trajectories).items() if k in names}
    rewards = [t.outcome for t in trajectories if not t.failed]
    return result | {"train/reward": float(np.mean(rewards)) if rewards else 0.0, "train/rows": len(rows)}


def describe_credit(columns) -> dict:
    """How much of the returns' variance the critic explains: 1 is all, 0 is none, below 0 is worse than a constant."""
    if "value_old" not in columns:
        return {}
    pairs = [np.broadcast_arrays(v, r) for v, r in zip(columns["value_old"], columns["ret"], strict=True)]
    value, ret = (np.concatenate(x) for x in zip(*pairs, strict=True))
    return {"critic/explained_variance": float(1 - np.var(ret - value) / np.var(ret)) if np.var(ret) > 0 else 0.0}


def mismatch(rows, logp_old, s: Settings, ranks: Ranks, *, first: bool) -> dict:
    """Sampler against trainer at the same weights, per token.

    A sampler that does not play the trained weights is an error in a run's first iteration, and a warning later.
    """
    z = np.concatenate([old - row.logp_rollout for old, row in zip(logp_old, rows, strict=True)])
    mean, bound = float(np.abs(z).mean()), 0.05 if ranks.cuda else 1e-4
    if mean > bound and s.top_p == 1:  # below 1 an engine may give log-probs of the tokens it kept
        found = f"The engine's log-probs differ from the trainer's by {mean:.2e} on average (bound {bound:g})"
        if first:
            raise UserError(f"{found}: it does not play the trained weights; compare the two engines on this model (--engine).")
        ranks.say(f"warning: {found}.")
    return {"mismatch/mean": mean, "mismatch/max": float(np.abs(z).max())}


def peak_memory_gb(ranks: Ranks) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if ranks.cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def draw_curve(metrics_file: Path, picture: Path, title: str):
    lines = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    fig, (ax,) = analyze.figure(1, 4, width=7)
    train = [(m["iteration"], m["train/success"]) for m in lines if "train/success" in m]
    held_out = [(m["iteration"], m["eval/success"], m["eval/stderr"]) for m in lines if "eval/success" in m]
    if train:
        ax.plot(*zip(*train, strict=True), color="0.7", label="training games, as sampled")
    if held_out:
        x, y, e = zip(*held_out, strict=True)
        ax.errorbar(x, y, yerr=e, marker="o", capsize=3, label=f"held-out games (n = {lines[-1].get('eval/n', '')})")
    ax.set(xlabel="iteration", ylabel="success rate", ylim=(0, 1), title=title)
    ax.grid(alpha=0.3)
    ax.legend()
    fig.savefig(picture)


class Log:
    """metrics.jsonl on rank 0: one object per iteration; a resumed run drops the lines after its checkpoint.

    last: the line of the checkpoint's iteration, on every rank; without a checkpoint that of iteration 0, still empty.
    """

    def __init__(self, path: Path, start: int, ranks: Ranks):
        self.path, self.ranks, self.lines = path, ranks, {}
        if ranks.rank == 0 and start and path.exists():
            lines = (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))
            self.lines = {line["iteration"]: line for line in lines if line["iteration"] <= start}
        self.last = ranks.gather(self.lines.get(start, {"iteration": start}))[0]

    def write(self, metrics: dict):
        """Add the line of an iteration, or replace it; the file is whole at any moment."""
        if self.ranks.rank == 0:
            self.lines[metrics["iteration"]] = metrics
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.lines.values()))
            os.replace(temporary, self.path)


# --------------------------------------------------------------------------------------------------------------- main


class Clock(dict):
    """Seconds per phase of an iteration."""

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        self[f"seconds/{phase}"] = time.perf_counter() - start


def tasks_of(tasks, s: Settings, iteration: int) -> list:
    """The iteration's tasks, from epoch-wise permutations: the iteration number is the whole data position."""
    picked = []
    for k in range((iteration - 1) * s.tasks, iteration * s.tasks):
        epoch, position = divmod(k, len(tasks))
        picked.append(tasks[np.random.default_rng((s.seed, 1, epoch)).permutation(len(tasks))[position]])
    return picked


def check(s: Settings, algo, context: int, world: int):
    """What can be refused before the first rollout."""
    least = dict.fromkeys(("seed", "max_steps", "critic_minibatch", "history_length", "slots"), 0)
    least |= dict.fromkeys(("lr", "lr_warmup", "critic_lr", "eval_tasks", "eval_temperature", "eval_seed"), 0)
    least |= dict.fromkeys(("iterations", "tasks", "rollouts", "minibatch", "passes", "prompt_tokens", "response_tokens"), 1)
    least |= dict.fromkeys(("eval_every", "save_every", "logit_chunk", "micro_tokens", "workers"), 1)
    for name, bound in least.items():
        if not getattr(s, name) >= bound:
            raise UserError(f"--{name} {getattr(s, name)}: give at least {bound}.")
    for name in ("temperature", "top_p", "grad_clip", "deadline", "gpu_memory"):
        if not getattr(s, name) > 0:
            raise UserError(f"--{name} {getattr(s, name)}: give a number above 0.")
    for name in ("top_p", "gpu_memory"):
        if getattr(s, name) > 1:
            raise UserError(f"--{name} {getattr(s, name)}: give at most 1.")
    if s.prompt_tokens >= context:
        raise UserError(f"--prompt_tokens {s.prompt_tokens} fills the model's context of {context}; give at most {context - 1}.")
    if "groups" in algo.NEEDS and s.rollouts < 2:
        raise UserError(f"--rollouts {s.rollouts}: this method compares trajectories of the same task; give at least 2.")
    if s.tasks * s.rollouts % world:
        what = f"{s.tasks} tasks x {s.rollouts} rollouts do not divide by {world} processes"
        raise UserError(f"{what}; change --tasks, --rollouts or --nproc_per_node.")


class Run:
    """Everything that lives for the whole run: settings, ranks, tasks, models, engine, environments, log."""

    under_way = False  # from here on, errors may be one rank's alone
    warned = False  # of a clip range below the noise

    def __init__(self, argv):
        self.algo, self.cfg, self.s, self.chosen = algo, cfg, s, chosen = parse(argv)
        self.ranks = ranks = Ranks()
        machine = f"{ranks.world} x {ranks.device.type}"
        ranks.say(f"preset {chosen.preset} ({chosen.why}): {s.model} on {chosen.env} with {chosen.algo}, {machine}")
        if s.top_p < 1:
            ranks.say(f"warning: --top_p {s.top_p} below 1 biases the importance ratio: the sampler is not the policy.")
        self.signals = []
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, lambda number, _: self.signals.append(number))
        torch.use_deterministic_algorithms(s.deterministic, warn_only=True)
        torch.manual_seed(s.seed)
        transformers_logging.disable_progress_bar()

        path = model_path(s.model)
        self.tokenizer, context = tokenizer_and_context(path)
        check(s, algo, context, ranks.world)
        self.env = envs.environment(chosen.env)
        for turn in (0, 1):  # the first process of each machine may have to make the data
            if (ranks.local == 0) == (turn == 0):
                self.tasks, held_out = self.env.tasks("train", s.data or None), self.env.tasks(s.eval_split, s.data or None)
            ranks.barrier()
        self.eval_tasks = evaluation.spread(held_out, s.eval_tasks)
        ranks.say(f"{len(self.tasks)} training tasks, {len(self.eval_tasks)} of {s.eval_split} for evaluation")
        self.out = self.choose_folder()

        self.models = {"policy": build(Policy, path, ranks, trained=True, **self.policy_options())}
        if "critic" in algo.NEEDS:
            self.models["critic"] = build(Critic, path, ranks, trained=True, grad_checkpoint=s.grad_checkpoint)
        if "hidden" in algo.NEEDS or ("reference" in algo.NEEDS and cfg.kl_coef > 0):
            self.models["reference"] = build(Policy, path, ranks, trained=False, **self.policy_options())
        self.optimizers = {
            part: torch.optim.AdamW(self.models[part].parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=s.weight_decay)
            for part, lr in (("policy", s.lr), ("critic", s.critic_lr)) if part in self.models
        }  # fmt: skip
        self.start = load_checkpoint(self.out / "checkpoints", chosen.algo, self.models, self.optimizers) if chosen.resume else 0

        self.engine = rollout.make_engine(
            s.engine, path, dtype="bfloat16" if ranks.cuda else "float32", max_model_len=min(context, s.prompt_tokens + s.response_tokens),
            seed=s.seed, device=str(ranks.device), memory=s.gpu_memory,
        )  # fmt: skip
        ranks.say(self.engine.about)
        share = -(-max(s.tasks * s.rollouts, len(self.eval_tasks)) // ranks.world)
        self.pool = envs.Pool(chosen.env, slots=s.slots or min(64, share), workers=s.workers, deadline=s.deadline)
        self.play_options = dict(
            style=s.style, max_steps=s.max_steps or self.env.max_steps, prompt_tokens=s.prompt_tokens,
            response_tokens=s.response_tokens, context=context, history_length=s.history_length,
            success_reward=s.success_reward, invalid_reward=s.invalid_reward,
            eos_ids=end_tokens(path, self.tokenizer), deterministic=s.deterministic, ranks=ranks, stop=lambda: bool(self.signals),
        )  # fmt: skip
        if ranks.rank == 0 and not chosen.resume:  # the last thing here: a run that was refused leaves nothing
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / "config.json").write_text(json.dumps(described(chosen, s, cfg), indent=1))
            except OSError as e:
                raise UserError(f"--out {self.out} cannot be written ({e.strerror}); give another folder.") from e
        self.log = Log(self.out / "metrics.jsonl", self.start, ranks)
        Run.under_way = True

    def policy_options(self) -> dict:
        return dict(temperature=self.s.temperature, chunk=self.s.logit_chunk, grad_checkpoint=self.s.grad_checkpoint)

    def choose_folder(self) -> Path:
        s, chosen = self.s, self.chosen
        stamp = f"runs/{chosen.algo}-{chosen.env.replace(':', '.')}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        out = Path(self.ranks.gather(s.out or stamp)[0])
        if not chosen.resume:
            taken = (out / "config.json").exists()
            self.ranks.barrier()
            if taken:
                raise UserError(f"--out {out} already holds a run; continue it with --resume {out} or give another folder.")
        return out

    def stopped(self) -> bool:
        """Did any rank get SIGTERM or ctrl-C?"""
        return any(self.ranks.gather(bool(self.signals)))

    def sample(self, number: int):
        """Trajectories of the iteration's tasks under the current policy, all ranks' together."""
        s = self.s
        return evaluation.play_all(
            self.engine, self.pool, self.env, self.tokenizer, tasks_of(self.tasks, s, number), repeats=s.rollouts, seed=s.seed,
            iteration=number, temperature=s.temperature, top_p=s.top_p, label=f"rollouts {number}", **self.play_options,
        )  # fmt: skip

    def evaluation_due(self, number: int) -> bool:
        return number % self.s.eval_every == 0 or number == self.s.iterations

    def evaluate(self, number: int) -> dict:
        """Every held-out task once, with the same sampling seeds each time; {} when interrupted."""
        began = time.perf_counter()
        rows, trajectories = evaluation.play_all(
            self.engine, self.pool, self.env, self.tokenizer, self.eval_tasks, seed=self.s.eval_seed, temperature=self.s.eval_temperature,
            label=f"evaluation {number}", **self.play_options,
        )  # fmt: skip
        if self.stopped():
            return {}
        result = evaluation.summary(rows, trajectories)
        self.ranks.say(f"iteration {number}: held-out success {result['success']:.3f} +- {result['stderr']:.3f} ({result['n']} tasks)")
        return {f"eval/{name}": x for name, x in result.items()} | {"seconds/eval": time.perf_counter() - began}

    def update(self, part: str, plans, rows, columns) -> dict:
        """All mini-batches of one model."""
        model, optimizer = self.models[part], self.optimizers[part]
        metrics = update(part, plans, rows, columns, model, optimizer, self.algo, self.cfg, self.s.grad_clip, self.ranks)
        noise, width = metrics.get("policy/ratio/noise", 0.0), self.cfg.clip_width
        if noise > width and not self.warned:
            self.ranks.say(f"warning: before any training, noise alone moves a ratio by {noise:.1e}; the clip range is {width:g}.")
            self.warned = True
        return metrics

    def sync(self):
        """The policy's weights to the engine."""
        self.engine.wake()
        self.engine.load_weights(full_weights(self.models["policy"]))

    def save(self, number: int):
        save_checkpoint(self.out / "checkpoints", number, self.chosen.algo, self.models, self.optimizers, self.ranks)

    def finish(self, number: int):
        s, ranks, out = self.s, self.ranks, self.out
        self.save(number)
        if number == s.iterations and not self.stopped():
            export(out / "export", self.models["policy"], self.tokenizer, described(self.chosen, s, self.cfg), ranks)
            if ranks.rank == 0:
                title = f"{self.chosen.algo} on {self.chosen.env} ({self.chosen.preset})"
                draw_curve(out / "metrics.jsonl", out / "learning_curve.png", title)
            ranks.say(f"done: {out} holds metrics.jsonl, learning_curve.png, checkpoints and export. Next: python eval.py {out}/export")
        else:
            ranks.say(f"stopped after iteration {number}. Next: torchrun --nproc_per_node={ranks.world} train.py --resume {out}")
        self.pool.close()
        ranks.close(self.engine)


def main(argv=None):
    run = Run(argv)
    algo, cfg, s, ranks, models = run.algo, run.cfg, run.s, run.ranks, run.models
    run.sync()
    if run.evaluation_due(run.start) and "eval/n" not in run.log.last:  # at the start, or where a signal cut it short
        run.log.write(run.log.last | run.evaluate(run.start))

    done = run.start
    bar = tqdm(total=s.iterations, initial=done, desc=run.chosen.algo, disable=ranks.rank != 0, mininterval=0.5)
    for number in range(run.start + 1, s.iterations + 1):
        if run.stopped():
            break
        clock = Clock()
        with clock("rollout"):  # 1. sample trajectories with the current policy
            rows, trajectories = run.sample(number)
        if run.stopped():
            break  # this iteration has changed nothing yet: a resumed run plays it again
        run.engine.sleep()
        metrics = {"iteration": number, **describe_rollouts(rows, trajectories)}

        if rows:
            lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rows]
            plans, critic_plans = (
                [
                    plan_pass(lengths, size=size, world=ranks.world, budget=s.micro_tokens, seed=(s.seed, 2, number, p))
                    for p in range(s.passes)
                ]
                for size in (s.minibatch, s.critic_minibatch or s.minibatch)
            )
            with clock("score"):  # 2. log-probs, values and reference log-probs at those weights
                columns = score(plans[0], rows, models, cfg, algo.NEEDS, ranks)
                metrics |= mismatch(rows, columns["logp_old"], s, ranks, first=number == run.start + 1)
            with clock("credit"):  # 3. credit over the whole batch
                batch = as_batch(rows, trajectories, columns)
                if getattr(cfg, "bootstrap_truncated", False):
                    batch["bootstrap"] = last_values(trajectories, s, models, cfg, ranks)
                columns |= per_row(algo.advantages(batch, cfg), rows)
                metrics |= describe_credit(columns)
            if s.log_rows and ranks.rank == 0:
                with clock("log_rows"):
                    analyze.save_rows(run.out / "rows" / f"{number:06d}.npz", rows, trajectories, columns, run.tokenizer)
            with clock("update"):  # 4. mini-batch updates
                if "critic" in models:
                    metrics |= run.update("critic", critic_plans, rows, columns)
                if number > getattr(cfg, "critic_warmup", 0):
                    metrics["policy/lr"] = run.optimizers["policy"].param_groups[0]["lr"] = learning_rate(s, cfg, number)
                    metrics |= run.update("policy", plans, rows, columns)
            metrics["tokens_per_second/update"] = sum(lengths) * s.passes / clock["seconds/update"]
            metrics["tokens_per_second/rollout"] = sum(len(r.response_ids) for r in rows) / clock["seconds/rollout"]
        with clock("sync"):  # 5. new weights to the engine
            run.sync()

        done = number
        metrics |= {**clock, "seconds/iteration": sum(clock.values()), "memory_gb/peak": max(ranks.gather(peak_memory_gb(ranks)))}
        if run.evaluation_due(number):
            metrics |= run.evaluate(number)
        run.log.write(metrics)
        bar.set_postfix(success=f"{metrics['train/success']:.2f}", steps=f"{metrics['train/steps']:.1f}", refresh=False)
        bar.update()
        if number % s.save_every == 0:
            run.save(number)
    bar.close()
    run.finish(done)


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        if os.environ.get("RANK", "0") == "0" or Run.under_way:  # before that, every rank finds the same
            print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)  # without waiting for other ranks, which may hang in a collective
