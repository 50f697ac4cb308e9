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
import shutil
import signal
import socket
import sys
import time
import typing
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict, StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

import envs
import eval as evaluation
import rollout
from envs import UserError

ROOT = Path(__file__).resolve().parent
ALGORITHMS = ("capo_action",)  # modules with the same few names: Config, NEEDS, PRESETS, advantages, ..., loss

# ---------------------------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Settings:
    model: str = ""  # hub name or folder with weights, tokenizer and chat template
    data: str = ""  # data folder of the environment; empty: its usual place; "mini": made by the project
    out: str = ""  # output folder; empty: runs/<algo>-<env>-<time>
    seed: int = 41  # of tasks, permutations and sampling
    iterations: int = 100  # rollout-and-update rounds
    style: str = "think_action"  # prompt style: think_action or tool_call
    tasks: int = 16  # different tasks per iteration
    rollouts: int = 8  # trajectories per task
    minibatch: int = 256  # rows (actions) per optimiser step, all ranks together
    passes: int = 1  # passes over the rows of an iteration
    lr: float = 1e-6  # learning rate of the policy, constant
    critic_lr: float = 1e-5  # learning rate of the critic, constant
    weight_decay: float = 0.01  # of AdamW
    grad_clip: float = 1.0  # maximum gradient norm, policy and critic each
    temperature: float = 1.0  # of rollouts; log-probs are taken at the same temperature
    top_p: float = 1.0  # of rollouts; below 1 the ratio is biased
    max_steps: int = 20  # actions per trajectory, then it is truncated
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
    engine: str = "auto"  # auto, vllm or transformers
    gpu_memory: float = 0.4  # share of a GPU's memory for vLLM
    micro_tokens: int = 16384  # padded tokens per forward pass and rank
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
                raise UserError(f"--{name} {getattr(chosen, name)} disagrees with the run in {chosen.resume}, which has {saved[name]}; leave the flag out.")
            setattr(chosen, name, saved[name])
    chosen.algo, chosen.env = chosen.algo or "capo_action", chosen.env or "alfworld"
    chosen.why = "--preset" if chosen.preset in ("mini", "paper") else ("a GPU is present" if torch.cuda.is_available() else "no GPU is present")
    if chosen.preset in (None, "auto"):
        chosen.preset = "paper" if torch.cuda.is_available() else "mini"

    algo = importlib.import_module(chosen.algo)
    preset = algo.PRESETS[chosen.preset].get(chosen.env, algo.PRESETS[chosen.preset]["alfworld"])
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
    cfg = algo.Config(**{name: args[name] for name in fields_with_help(algo.Config)})
    if saved:
        for now, then in ((settings, saved["settings"]), (cfg, saved["config"])):
            for name, value in dataclasses.asdict(now).items():
                if value != then[name]:
                    raise UserError(f"--{name} {value} disagrees with the run in {chosen.resume}, which has {then[name]}; leave the flag out or start a new run.")
        settings.out = chosen.resume
    return algo, cfg, settings, chosen


# ------------------------------------------------------------------------------------------------------------- ranks


class Ranks:
    """The processes of torchrun, or one alone. CUDA where there is one, else the CPU with gloo."""

    def __init__(self):
        if "RANK" not in os.environ:  # plain `python train.py`
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(s.getsockname()[1]))
        self.rank, self.world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self.local, self.cuda = local, torch.cuda.is_available()
        if self.cuda and local >= torch.cuda.device_count():
            raise UserError(f"--nproc_per_node is above the {torch.cuda.device_count()} GPUs of this machine; start one process per GPU.")
        self.device = torch.device("cuda", local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo", timeout=datetime.timedelta(hours=2))
        self.mesh = init_device_mesh(self.device.type, (self.world,))
        self.objects = dist.new_group(backend="gloo")

    def gather(self, thing) -> list:
        """The thing of every rank, on every rank."""
        things = [None] * self.world
        dist.all_gather_object(things, thing, group=self.objects)
        return things

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.device, torch.float64)
        dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def say(self, *words):
        if self.rank == 0:
            tqdm.write(" ".join(map(str, words)), file=sys.stdout)
            sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------ models


class Policy(nn.Module):
    """Log-probs of given replies. One forward gives what every algorithm reads.

    ids: (n, S) prompt and reply, right-padded: the causal mask alone keeps padding out of every real position.
    index, targets, compute: (n, L) position before each response token, the token, and which to compute.
    Returns logp and entropy (n, L) at `temperature`, float32, 0 where not computed, and hidden (n, d): the last
    hidden state, after the final norm, at the last prompt token.
    """

    def __init__(self, lm, *, temperature: float, chunk: int):
        super().__init__()
        self.lm, self.temperature, self.chunk = lm, temperature, chunk

    def forward(self, ids, index, targets, compute):
        hidden = self.lm.model(input_ids=ids, use_cache=False).last_hidden_state  # (n, S, d)
        at = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))  # (n, L, d)
        flat, flat_targets = at[compute], targets[compute]  # (M, d), (M,)
        chunks = []
        for x, y in zip(flat.split(self.chunk), flat_targets.split(self.chunk), strict=True):
            # Logits of a chunk live only here: they are computed again in the backward pass.
            chunks.append(recompute(self._logprobs, x, y, use_reentrant=False) if torch.is_grad_enabled() else self._logprobs(x, y))
        logp, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        empty = torch.zeros(compute.shape, device=ids.device)
        return {
            "logp": empty.masked_scatter(compute, logp),
            "entropy": empty.masked_scatter(compute, entropy),
            "hidden": at[:, 0].detach(),
        }

    def _logprobs(self, x, y):
        logp = F.log_softmax(self.lm.lm_head(x).float() / self.temperature, dim=-1)  # (m, vocabulary)
        return logp.gather(1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


class Critic(nn.Module):
    """A full model with a scalar float32 head; `value` (n, 1 or L) at the given positions."""

    def __init__(self, backbone, width: int):
        super().__init__()
        self.model, self.head = backbone, nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids, index):
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return {"value": self.head(hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1])).float())[..., 0]}


def build(kind, path: str, s: Settings, ranks: Ranks, *, trained: bool) -> nn.Module:
    """Load, shard layer by layer (float32 masters, bf16 compute on CUDA), freeze unless trained."""
    config = AutoConfig.from_pretrained(path)
    for name in vars(config):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)  # the ratio must be 1 at unchanged weights
    loader = AutoModelForCausalLM if kind is Policy else AutoModel
    backbone = loader.from_pretrained(path, config=config, dtype="auto", attn_implementation="sdpa")
    if s.grad_checkpoint and trained:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = Policy(backbone, temperature=s.temperature, chunk=s.logit_chunk) if kind is Policy else Critic(backbone, config.get_text_config().hidden_size)
    module.train(trained).requires_grad_(trained)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if ranks.cuda else MixedPrecisionPolicy()
    for layer in (backbone.model if kind is Policy else backbone).layers:
        fully_shard(layer.float(), mesh=ranks.mesh, mp_policy=policy)
    if kind is Critic:
        fully_shard(module.head, mesh=ranks.mesh)
    return fully_shard(module.float(), mesh=ranks.mesh, mp_policy=policy)


def full_weights(policy: Policy):
    """(checkpoint name, full tensor) of every parameter; every rank must walk through all of them."""
    for name, p in policy.lm.named_parameters():
        yield name, p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()


# ----------------------------------------------------------------------------------------------------- micro-batches


def plan_pass(lengths, *, size: int, world: int, budget: int, seed: tuple) -> list:
    """Mini-batches of one pass: plan[m][rank] = list of micro-batches, each a list of row numbers.

    Rows are permuted by `seed` and cut into ceil(N/size) mini-batches whose sizes differ by at most 1; each is dealt to
    the ranks by token count and packed, rows of similar length together, into micro-batches of at most `budget` padded
    tokens (or one row). All ranks get the same number; an empty list stands for a filler.
    """
    lengths = np.asarray(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    plan = []
    for rows in np.array_split(order, -(-len(order) // size)):
        shares = [[] for _ in range(world)]
        load = [0] * world
        for row in sorted(rows.tolist(), key=lambda r: (-lengths[r], r)):
            lightest = load.index(min(load))
            shares[lightest].append(row)
            load[lightest] += int(lengths[row])
        packed = []
        for share in shares:
            micro = []
            for row in share:  # longest first, so the first of a micro-batch sets its width
                if micro and lengths[micro[-1][0]] * (len(micro[-1]) + 1) <= budget:
                    micro[-1].append(row)
                else:
                    micro.append([row])
            packed.append(micro)
        most = max(map(len, packed))
        plan.append([micro + [[] for _ in range(most - len(micro))] for micro in packed])
    return plan


def collate(rows, picks, columns, device) -> dict:
    """Tensors of one micro-batch. columns: {name: one 1-D array per row, of length 1 or of the reply's length}.

    An empty `picks` gives the filler: one row of two tokens with an all-False mask, which stays in the graph (every rank
    must run the same collectives) and changes nothing.
    """
    prompts = [rows[r].prompt_ids for r in picks] or [np.zeros(1, np.int32)]
    replies = [rows[r].response_ids for r in picks] or [np.zeros(1, np.int32)]
    n, width = len(prompts), max(map(len, replies))
    ids = torch.zeros(n, max(len(p) + len(r) for p, r in zip(prompts, replies, strict=True)), dtype=torch.long)
    targets, index = torch.zeros(n, width, dtype=torch.long), torch.zeros(n, width, dtype=torch.long)
    compute = torch.zeros(n, width, dtype=torch.bool)
    for k, (p, r) in enumerate(zip(prompts, replies, strict=True)):
        ids[k, : len(p) + len(r)] = torch.from_numpy(np.concatenate([p, r]).astype(np.int64))
        targets[k, : len(r)] = torch.from_numpy(r.astype(np.int64))
        index[k] = (len(p) - 1 + torch.arange(width)).clamp(max=len(p) + len(r) - 2)
        compute[k, : len(r)] = True
    batch = {"ids": ids, "targets": targets, "index": index, "compute": compute, "mask": compute if picks else torch.zeros_like(compute)}
    for name, column in columns.items():
        values = [column[r] for r in picks] or [np.zeros(1, np.float32)]
        batch[name] = torch.zeros(n, max(map(len, values)))
        for k, value in enumerate(values):
            batch[name][k, : len(value)] = torch.as_tensor(value)
    return {name: x.to(device) for name, x in batch.items()}


def policy_out(policy, batch):
    return policy(batch["ids"], batch["index"], batch["targets"], batch["compute"])


def critic_out(critic, batch, value_at: str):
    if value_at == "tokens":
        return critic(batch["ids"], batch["index"])
    index = batch["index"][:, :1]  # the last prompt token: what follows it need not be read
    return critic(batch["ids"][:, : int(index.max()) + 1], index)


# ---------------------------------------------------------------------------------------------- the steps of the loop


@torch.no_grad()
def score(plan, rows, models, cfg, ranks) -> dict:
    """logp_old, logp_ref, value (and hidden) of every row at the rollout weights, on every rank.

    Uses the micro-batches of the first pass, so that the ratio of its first mini-batch is exactly 1.
    """
    mine = {}
    for minibatch in plan:
        for picks in minibatch[ranks.rank]:
            batch = collate(rows, picks, {}, ranks.device)
            out = {"logp_old": policy_out(models["policy"], batch)["logp"]}
            if "reference" in models:
                reference = policy_out(models["reference"], batch)
                out |= {"logp_ref": reference["logp"], "hidden": reference["hidden"]}
            if "critic" in models:
                out["value"] = critic_out(models["critic"], batch, cfg.value_at)["value"]
            out = {name: x.float().cpu().numpy() for name, x in out.items()}
            for k, row in enumerate(picks):
                length = len(rows[row].response_ids)
                mine[row] = {name: x[k] if name == "hidden" else x[k, :length] for name, x in out.items()}
    everyone = {row: values for part in ranks.gather(mine) for row, values in part.items()}
    return {name: [everyone[row][name] for row in range(len(rows))] for name in everyone[0]}


def as_batch(rows, trajectories, columns) -> dict:
    """The global batch that `advantages` reads: one entry per row, ragged token columns padded to (N, L)."""
    of = {t.traj: t for t in trajectories}
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
        "outcome": [of[r.traj].outcome for r in rows],
        "info": [r.info for r in rows],
        "mask": torch.arange(width) < torch.tensor([len(r.response_ids) for r in rows])[:, None],
        **{name: pad(column) for name, column in columns.items()},
    }


def mini_batch_sums(algo, cfg, models, micro, outs, *, unchanged: bool, ranks):
    """The mini-batch's `pre_update` and `denominators`, summed over micro-batches and ranks."""
    pre, counts = [], []
    for k, batch in enumerate(micro):
        logp = batch["logp_old"]  # at unchanged weights z is 0; later it takes the forward pass at hand, or one of its own
        if not unchanged and algo.pre_update(logp, batch, cfg).numel():
            with torch.no_grad():
                logp = (outs[k] if outs else policy_out(models["policy"], batch))["logp"].detach()
        pre.append(algo.pre_update(logp, batch, cfg))
        counts.append(algo.denominators(batch, cfg))
    names = sorted(counts[0])
    sums = ranks.sum(torch.cat([torch.stack([sum(c[name] for c in counts) for name in names]).double(), sum(pre)]))
    return sums[len(names) :], {name: sums[i].clamp(min=1).float() for i, name in enumerate(names)}


def update(plans, rows, columns, algo, cfg, models, optimizers, s: Settings, ranks: Ranks, *, train_policy: bool) -> dict:
    """All passes and mini-batches of an iteration. Returns {metric: value}, reduced over mini-batches and ranks."""
    metrics, norms = [], {}
    policy_parts = ["policy"] if train_policy else []
    unchanged = True
    for plan in plans:
        for minibatch in plan:
            micro = [collate(rows, picks, columns, ranks.device) for picks in minibatch[ranks.rank]]
            outs = [policy_out(models["policy"], micro[0])] if train_policy and len(micro) == 1 else []
            pre, denom = mini_batch_sums(algo, cfg, models, micro, outs, unchanged=unchanged or not train_policy, ranks=ranks)
            for part in policy_parts + (["critic"] if "critic" in models else []):
                for batch in micro:
                    if part == "critic":
                        out = critic_out(models["critic"], batch, cfg.value_at)
                    else:
                        out = outs.pop() if outs else policy_out(models["policy"], batch)
                    loss, measured = algo.loss(out, batch, cfg, pre=pre, denom=denom)
                    (loss * ranks.world).backward()  # FSDP averages gradients over ranks; the denominators are global already
                    metrics.append({k: (float(a), None if b is None else float(b)) for k, (a, b) in measured.items()})
                parameters = list(models[part].parameters())
                norm = float(nn.utils.clip_grad_norm_(parameters, s.grad_clip).full_tensor())
                if np.isfinite(norm):
                    optimizers[part].step()
                optimizers[part].zero_grad(set_to_none=True)
                norms.setdefault(f"{part}/grad_norm", []).append(norm if np.isfinite(norm) else 0.0)
                norms.setdefault(f"{part}/steps_skipped", []).append(float(not np.isfinite(norm)))
            unchanged = not train_policy
    totals = {}
    for part in ranks.gather(metrics):
        for measured in part:
            for name, (a, b) in measured.items():
                total, count = totals.get(name, (0.0 if b is not None else -np.inf, 0.0))
                totals[name] = (max(total, a), None) if b is None else (total + a, count + b)
    reduced = {name: a if b is None else a / max(b, 1.0) for name, (a, b) in totals.items()}
    return reduced | {name: float(np.sum(x) if name.endswith("skipped") else np.mean(x)) for name, x in norms.items()}


# -------------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(folder: Path, iteration: int, chosen, models, optimizers, ranks: Ranks):
    """checkpoints/NNNNNN, written under a temporary name and renamed when whole; the last two are kept."""
    final, temporary = folder / f"{iteration:06d}", folder / f".{iteration:06d}.tmp"
    if final.exists():
        return
    error = None
    try:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier(group=ranks.objects)
        state = {part: dict(zip(("model", "optimizer"), get_state_dict(models[part], opt), strict=True)) for part, opt in optimizers.items()}
        dcp.save(state, checkpoint_id=temporary, process_group=ranks.objects if not ranks.cuda else None)
        if ranks.rank == 0:
            (temporary / "meta.json").write_text(json.dumps({"algo": chosen.algo, "iteration": iteration, "world": ranks.world}))
    except (OSError, dcp.api.CheckpointException) as e:
        error = str(e).strip().split("\n")[-1]
    errors = [e for e in ranks.gather(error) if e]
    if errors:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        last = max((p.name for p in folder.glob("[0-9]*")), default="none")
        raise UserError(f"The checkpoint of iteration {iteration} could not be written to {folder} ({errors[0]}); make room and continue with --resume {folder.parent} (last good checkpoint: {last}).")
    if ranks.rank == 0:
        os.rename(temporary, final)
        for old in sorted(folder.glob("[0-9]*"))[:-2]:
            shutil.rmtree(old)
    dist.barrier(group=ranks.objects)


def load_checkpoint(folder: Path, chosen, models, optimizers, ranks: Ranks) -> int:
    """Loads the last whole checkpoint; returns its iteration (0: there is none yet). Any number of ranks may read it."""
    good = sorted(p for p in folder.glob("[0-9]*") if (p / "meta.json").exists())
    if not good:
        return 0
    meta = json.loads((good[-1] / "meta.json").read_text())
    if meta["algo"] != chosen.algo:
        raise UserError(f"{good[-1]} is a checkpoint of {meta['algo']}, not of {chosen.algo}; give --algo {meta['algo']} or another folder.")
    for part, opt in optimizers.items():
        model, optimizer = get_state_dict(models[part], opt)
        state = {part: {"model": model, "optimizer": optimizer}}
        dcp.load(state, checkpoint_id=good[-1])
        set_state_dict(models[part], opt, model_state_dict=state[part]["model"], optim_state_dict=state[part]["optimizer"])
    return meta["iteration"]


def export(folder: Path, policy: Policy, tokenizer, chosen, s: Settings, ranks: Ranks):
    """A Hugging Face folder: weights in the engine's dtype, config, tokenizer with its template, and run.json for eval.py."""
    weights = get_model_state_dict(policy.lm, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ranks.rank == 0:
        dtype = torch.bfloat16 if ranks.cuda else torch.float32
        temporary = folder.with_name(".export.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(policy.lm.config, dtype=dtype)
        weights = {k: v.to(dtype) for k, v in weights.items()}
        if model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        (temporary / "run.json").write_text(json.dumps(described(chosen, s), indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    dist.barrier(group=ranks.objects)


def described(chosen, s: Settings, cfg=None) -> dict:
    names = {"algo": chosen.algo, "env": chosen.env, "preset": chosen.preset}
    return names | {"settings": dataclasses.asdict(s)} | ({"config": dataclasses.asdict(cfg)} if cfg else {})


# ------------------------------------------------------------------------------------------------------------ metrics


def describe_rollouts(trajectories, rows) -> dict:
    done = [t for t in trajectories if not t.failed]
    mean = lambda xs: float(np.mean(xs)) if len(xs) else 0.0  # noqa: E731
    return {
        "train/success": mean([t.success for t in done]),
        "train/reward": mean([t.outcome for t in done]),
        "train/score": mean([t.score for t in done]),
        "train/steps": mean([t.steps for t in done]),
        "train/truncated": mean([t.truncated for t in done]),
        "train/failed": len(trajectories) - len(done),
        "train/invalid": mean([r.invalid for r in rows]),
        "train/reply_tokens": mean([len(r.response_ids) for r in rows]),
        "train/prompt_tokens": mean([len(r.prompt_ids) for r in rows]),
        "train/rows": len(rows),
    }


def explained_variance(value, ret) -> float:
    variance = np.var(ret)
    return float(1 - np.var(ret - value) / variance) if variance > 0 else 0.0


def draw_curve(metrics_file: Path, picture: Path, title: str):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    fig, ax = plt.subplots(figsize=(7, 4), dpi=120)
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
    fig.tight_layout()
    fig.savefig(picture)
    plt.close(fig)


class Log:
    """metrics.jsonl on rank 0: one object per iteration; a resumed run drops the lines after its checkpoint."""

    def __init__(self, path: Path, start: int, ranks: Ranks):
        self.path, self.ranks = path, ranks
        if ranks.rank == 0:
            lines = path.read_text().splitlines() if path.exists() else []
            keep = [line for line in lines if line.endswith("}") and json.loads(line)["iteration"] <= start]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in keep))
            os.replace(temporary, path)

    def write(self, metrics: dict):
        if self.ranks.rank == 0:
            with open(self.path, "a") as f:
                f.write(json.dumps(metrics) + "\n")


# --------------------------------------------------------------------------------------------------------------- main


class Clock(dict):
    """Seconds per phase of an iteration."""

    @contextlib.contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        self[f"seconds/{phase}"] = self.get(f"seconds/{phase}", 0.0) + time.perf_counter() - start


def check(s: Settings, context: int, ranks: Ranks, train_tasks, eval_tasks, algo):
    """Errors before the first rollout."""
    if s.prompt_tokens >= context:
        raise UserError(f"--prompt_tokens {s.prompt_tokens} leaves no room in the model's context of {context}; give at most {context - 1}.")
    if "groups" in algo.NEEDS and s.rollouts < 2:
        raise UserError(f"--rollouts {s.rollouts}: this method compares trajectories of the same task; give at least 2.")
    if (s.tasks * s.rollouts) % ranks.world:
        raise UserError(f"{s.tasks} tasks x {s.rollouts} rollouts do not divide by {ranks.world} processes; change --tasks, --rollouts or --nproc_per_node.")
    for name, tasks in (("train", train_tasks), (s.eval_split, eval_tasks)):
        if not tasks:
            raise UserError(f"The split {name} of the data in {s.data or 'the default place'} is empty; give another --data or split.")
    if s.top_p < 1:
        ranks.say(f"warning: --top_p {s.top_p} below 1 biases the importance ratio (the sampler's distribution is not the policy's).")


def tasks_of(tasks, s: Settings, iteration: int) -> list:
    """The iteration's tasks, from epoch-wise permutations: the iteration number is the whole data position."""
    picked = []
    for k in range((iteration - 1) * s.tasks, iteration * s.tasks):
        epoch, position = divmod(k, len(tasks))
        picked.append(tasks[np.random.default_rng((s.seed, 1, epoch)).permutation(len(tasks))[position]])
    return picked


def end_tokens(path: str, tokenizer) -> list[int]:
    """Ids that end a reply: the tokenizer's and those of the model's generation_config.json (Llama and Qwen have several)."""
    try:
        more = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        more = None
    ids = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
    if not ids:
        raise UserError(f"The model {path} has no end token in its tokenizer or generation_config.json; add eos_token there.")
    return sorted(ids)


def main(argv=None):
    algo, cfg, s, chosen = parse(argv)
    ranks = Ranks()
    ranks.say(f"preset {chosen.preset} ({chosen.why}): {s.model} on {chosen.env}, {chosen.algo}, {ranks.world} x {ranks.device.type}")
    stop = []
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.append(1))
    if s.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(s.seed)
    transformers_logging.disable_progress_bar()

    # ---- tasks, models, engine, environments
    env = envs.environment(chosen.env)
    for turn in (0, 1):  # the first process of each machine may have to make the data
        if (ranks.local == 0) == (turn == 0):
            train_tasks, eval_tasks = env.tasks("train", s.data or None), env.tasks(s.eval_split, s.data or None)
        dist.barrier(group=ranks.objects)
    eval_tasks = eval_tasks[: s.eval_tasks or None]
    ranks.say(f"{len(train_tasks)} training tasks, {len(eval_tasks)} for evaluation ({s.eval_split})")
    path = s.model if os.path.exists(s.model) or not (ROOT / s.model).exists() else str(ROOT / s.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    context = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
    check(s, context, ranks, train_tasks, eval_tasks, algo)
    out = Path(ranks.gather(s.out or f"runs/{chosen.algo}-{chosen.env.replace(':', '.')}-{datetime.datetime.now():%Y%m%d-%H%M%S}")[0])
    if ranks.rank == 0 and not chosen.resume:
        if (out / "config.json").exists():
            raise UserError(f"--out {out} already holds a run; continue it with --resume {out} or give another folder.")
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(described(chosen, s, cfg), indent=1))

    models = {"policy": build(Policy, path, s, ranks, trained=True)}
    if "critic" in algo.NEEDS:
        models["critic"] = build(Critic, path, s, ranks, trained=True)
    if "hidden" in algo.NEEDS or ("reference" in algo.NEEDS and cfg.kl_coef > 0):
        models["reference"] = build(Policy, path, s, ranks, trained=False)
    rates = {"policy": s.lr, "critic": s.critic_lr}
    optimizers = {
        part: torch.optim.AdamW(models[part].parameters(), lr=rates[part], betas=(0.9, 0.999), weight_decay=s.weight_decay)
        for part in models if part != "reference"
    }  # fmt: skip
    start = load_checkpoint(out / "checkpoints", chosen, models, optimizers, ranks) if chosen.resume else 0
    log = Log(out / "metrics.jsonl", start, ranks)

    eos = end_tokens(path, tokenizer)
    engine = rollout.make_engine(
        s.engine, path, dtype="bfloat16" if ranks.cuda else "float32", max_model_len=min(context, s.prompt_tokens + s.response_tokens),
        seed=s.seed, device=str(ranks.device), memory=s.gpu_memory,
    )  # fmt: skip
    ranks.say(engine.about)
    slots = s.slots or min(64, max(s.tasks * s.rollouts, len(eval_tasks)) // ranks.world + 1)
    pool = envs.Pool(chosen.env, slots=slots, workers=s.workers, deadline=s.deadline)
    play = dict(
        style=s.style, max_steps=s.max_steps, prompt_tokens=s.prompt_tokens, response_tokens=s.response_tokens, context=context,
        history_length=s.history_length, success_reward=s.success_reward, invalid_reward=s.invalid_reward, eos_ids=eos,
        deterministic=s.deterministic,
    )  # fmt: skip

    def evaluate(iteration) -> dict:
        """Every held-out task once, with the same sampling seeds each time."""
        rows, trajectories = evaluation.play_all(
            engine, pool, env, tokenizer, eval_tasks, ranks=ranks, seed=s.eval_seed, temperature=s.eval_temperature,
            label=f"evaluation {iteration}", stop=lambda: bool(stop), **play,
        )  # fmt: skip
        result = evaluation.summary(rows, trajectories)
        ranks.say(f"iteration {iteration}: held-out success {result['success']:.3f} +- {result['stderr']:.3f} ({result['n']} games)")
        return {f"eval/{k}": v for k, v in result.items() if isinstance(v, int | float)}

    engine.load_weights(full_weights(models["policy"]))
    if start == 0:
        first = evaluate(0)
        if not ranks.any(bool(stop)):
            log.write({"iteration": 0, **first})

    # ---- the algorithm
    bar = tqdm(total=s.iterations, initial=start, desc=chosen.algo, disable=ranks.rank != 0, position=0)
    iteration = start
    while iteration < s.iterations and not ranks.any(bool(stop)):
        clock, began = Clock(), time.perf_counter()
        number = iteration + 1
        with clock("rollout"):  # 1. sample trajectories with the current policy
            todo = tasks_of(train_tasks, s, number)
            rows, trajectories = evaluation.play_all(
                engine, pool, env, tokenizer, todo, repeats=s.rollouts, ranks=ranks, seed=s.seed, iteration=number, temperature=s.temperature, top_p=s.top_p,
                label=f"rollouts {number}", stop=lambda: bool(stop), **play,
            )  # fmt: skip
            engine.sleep()
        if ranks.any(bool(stop)):
            break
        metrics = {"iteration": number, **describe_rollouts(trajectories, rows)}
        if rows:
            lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rows]
            plans = [
                plan_pass(lengths, size=s.minibatch, world=ranks.world, budget=s.micro_tokens, seed=(s.seed, 2, number, p)) for p in range(s.passes)
            ]
            with clock("score"):  # 2. log-probs and values at the rollout weights
                columns = score(plans[0], rows, models, cfg, ranks)
                metrics |= mismatch(rows, columns["logp_old"], ranks)
                if metrics["mismatch/ratio_noise"] > cfg.eps and number == start + 1:
                    ranks.say(f"warning: engine noise moves the action ratio by {metrics['mismatch/ratio_noise']:.1e}, more than the clip range {cfg.eps:g}.")
            with clock("credit"):  # 3. credit over the whole batch
                batch = as_batch(rows, trajectories, columns)
                credit = algo.advantages(batch, cfg)
                for name, x in credit.items():
                    columns[name] = [x[n, : len(r.response_ids)].numpy() for n, r in enumerate(rows)]
                if "value" in columns:
                    columns["value_old"] = columns.pop("value")
                    metrics["critic/explained_variance"] = explained_variance(np.concatenate([v[: len(g)] for v, g in zip(columns["value_old"], columns["ret"], strict=True)]), np.concatenate(columns["ret"]))
                columns.pop("hidden", None)
            with clock("update"):  # 4. mini-batch updates
                train_policy = number > getattr(cfg, "critic_warmup", 0)
                metrics |= update(plans, rows, columns, algo, cfg, models, optimizers, s, ranks, train_policy=train_policy)
        with clock("sync"):  # 5. new weights to the engine
            engine.wake()
            engine.load_weights(full_weights(models["policy"]))
        iteration = number
        metrics |= {**clock, "seconds/iteration": time.perf_counter() - began}
        metrics["tokens_per_second/update"] = sum(lengths) * s.passes / clock["seconds/update"] if rows else 0.0
        metrics["tokens_per_second/rollout"] = sum(len(r.response_ids) for r in rows) / clock["seconds/rollout"]
        metrics["memory_gb/peak"] = max(ranks.gather(peak_memory_gb(ranks)))
        if number % s.eval_every == 0 or number == s.iterations:
            with clock("eval"):
                metrics |= evaluate(number)
            metrics["seconds/eval"] = clock["seconds/eval"]
        if ranks.any(bool(stop)) and "eval/success" in metrics:
            metrics = {k: v for k, v in metrics.items() if not k.startswith("eval/")}  # an interrupted evaluation counts for nothing
        log.write(metrics)
        bar.update()
        bar.set_postfix({"success": f"{metrics['train/success']:.2f}", "steps": f"{metrics['train/steps']:.1f}", "s": f"{metrics['seconds/iteration']:.1f}"})
        if number % s.save_every == 0 or number == s.iterations:
            save_checkpoint(out / "checkpoints", number, chosen, models, optimizers, ranks)
    bar.close()

    # ---- the end: finished, or asked to stop
    save_checkpoint(out / "checkpoints", iteration, chosen, models, optimizers, ranks)
    finished = iteration == s.iterations
    if finished:
        export(out / "export", models["policy"], tokenizer, chosen, s, ranks)
        if ranks.rank == 0:
            draw_curve(out / "metrics.jsonl", out / "learning_curve.png", f"{chosen.algo} on {chosen.env} ({chosen.preset})")
    ranks.say(
        f"done: {out}/metrics.jsonl, learning_curve.png, checkpoints, export. Next: python eval.py {out}/export"
        if finished else f"stopped after iteration {iteration}. Next: torchrun --nproc_per_node={ranks.world} train.py --resume {out}"
    )  # fmt: skip
    pool.close()
    engine.close()
    dist.barrier(group=ranks.objects)
    dist.destroy_process_group()


def mismatch(rows, logp_old, ranks: Ranks) -> dict:
    """Sampler against trainer at the same weights, per token; and how far that noise alone moves an action's sqrt-length ratio from 1."""
    differences = [old - row.logp_rollout for old, row in zip(logp_old, rows, strict=True)]
    tokens = np.abs(np.concatenate(differences))
    bound = 0.05 if ranks.cuda else 1e-4
    if tokens.mean() > bound:
        raise UserError(
            f"The engine's log-probs differ from the trainer's by {tokens.mean():.2e} on average (bound {bound:g}): it does not play the "
            "trained weights; try --engine transformers, and compare the two engines on this model."
        )
    noise = [abs(float(np.expm1(d.sum() / np.sqrt(len(d))))) for d in differences]
    return {"mismatch/mean": float(tokens.mean()), "mismatch/max": float(tokens.max()), "mismatch/ratio_noise": float(np.mean(noise))}


def peak_memory_gb(ranks: Ranks) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if ranks.cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {e}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)
