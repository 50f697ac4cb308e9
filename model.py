"""What is trained: ranks, models, sharding, micro-batches, checkpoints, export.

Every model runs under torch's FSDP2, on one process as on sixty-four: float32 masters, bf16 compute on CUDA. The rows of a
micro-batch are laid end to end, so that no padding is computed.
"""

import datetime
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from envs import UserError, render

ROOT = Path(__file__).resolve().parent
PATIENCE = datetime.timedelta(hours=2)  # of a rank that waits for the slowest rollout

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
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if self.cuda and processes > torch.cuda.device_count():
            raise UserError(f"--nproc_per_node={processes}: this machine has {torch.cuda.device_count()} GPUs; start one process per GPU.")
        self.device = torch.device("cuda", local) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo", timeout=PATIENCE)
        except dist.DistNetworkError as e:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(f"The processes cannot meet at {where} ({str(e).splitlines()[0]}); give torchrun another --master_port.") from e
        self.mesh = init_device_mesh(self.device.type, (self.world,))
        self.objects = dist.new_group(backend="gloo", timeout=PATIENCE)  # for what is not a tensor, and for waiting

    def gather(self, thing) -> list:
        """The thing of every rank, on every rank."""
        things = [None] * self.world
        dist.all_gather_object(things, thing, group=self.objects)
        return things

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.device, torch.float64)
        dist.all_reduce(x)
        return x

    def barrier(self):
        dist.barrier(group=self.objects)

    def close(self, engine):
        """The end of all processes together; vLLM's engine takes the process group with it."""
        self.barrier()
        engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def say(self, *words):
        if self.rank == 0:
            tqdm.write(" ".join(map(str, words)), file=sys.stdout)
            sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------ models


def packed_attention(module, query, key, value, attention_mask, *, lengths, scaling=None, **_):
    """Causal attention of rows laid end to end: query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D), None."""
    rows = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)  # split: one cat in the backward pass
    options = dict(is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return torch.cat([F.scaled_dot_product_attention(q, k, v, **options) for q, k, v in rows], dim=2).transpose(1, 2), None


AttentionInterface.register("packed", packed_attention)


def hidden_at(backbone, ids, index):
    """Last hidden states (n, L, d), after the final norm, of right-padded ids (n, S) at the positions index (n, L).

    The rows are laid end to end in one sequence of which only attention knows the parts: padding, and what follows the last
    position asked for, is not computed.
    """
    lengths = index.max(1).values + 1  # (n,)
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    real = column < lengths[:, None]
    out = backbone(input_ids=ids[real][None], position_ids=column[real][None], use_cache=False, lengths=lengths.tolist())
    return out.last_hidden_state[0][(lengths.cumsum(0) - lengths)[:, None] + index]


class Policy(nn.Module):
    """Log-probs of given replies. One forward gives what every algorithm reads.

    ids: (n, S) prompt and reply, right-padded.
    index, targets, compute: (n, L) position before each response token, the token, and which to compute.
    Returns logp and entropy (n, L) at `temperature`, float32, 0 where not computed, and hidden (n, d): the last
    hidden state, after the final norm, at the last prompt token.
    """

    def __init__(self, lm, *, temperature: float = 1.0, chunk: int = 2048):
        super().__init__()
        lm.set_attn_implementation("packed")
        self.lm, self.temperature, self.chunk = lm, temperature, chunk

    @property
    def backbone(self):
        return self.lm.model

    def forward(self, ids, index, targets, compute):
        at = hidden_at(self.backbone, ids, index)
        flat, flat_targets = at[compute], targets[compute]  # (M, d), (M,)
        chunks = []
        for x, y in zip(flat.split(self.chunk), flat_targets.split(self.chunk), strict=True):
            # Logits of a chunk live only here: they are computed again in the backward pass.
            chunks.append(recompute(self._logprobs, x, y, use_reentrant=False) if torch.is_grad_enabled() else self._logprobs(x, y))
        logp, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        empty = torch.zeros(compute.shape, device=ids.device, dtype=logp.dtype)
        return {
            "logp": empty.masked_scatter(compute, logp),
            "entropy": empty.masked_scatter(compute, entropy),
            "hidden": at_least_float32(at[:, 0].detach()),
        }

    def _logprobs(self, x, y):
        logp = F.log_softmax(at_least_float32(self.lm.lm_head(x)) / self.temperature, dim=-1)  # (m, vocabulary)
        return logp.gather(1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ValueHead(nn.Module):
    """Scalar head in float32."""

    # Paper silent: the critic's value head starts at zero, so that the first advantages are the returns.

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(1))

    def forward(self, hidden):
        return (at_least_float32(hidden) * self.weight).sum(-1) + self.bias


class Critic(nn.Module):
    """A full model of its own with a scalar head; `value` (n, 1 or L) at the given positions."""

    def __init__(self, backbone, width: int):
        super().__init__()
        backbone.set_attn_implementation("packed")
        self.backbone, self.head = backbone, ValueHead(width)

    def forward(self, ids, index):
        return {"value": self.head(hidden_at(self.backbone, ids, index))}


def build(kind, path: str, ranks: Ranks, *, trained: bool, grad_checkpoint: bool = False, **policy_options) -> nn.Module:
    """Policy or Critic from a checkpoint: loaded as stored, then made float32 and sharded one layer at a time."""
    config = AutoConfig.from_pretrained(path)
    for name, value in vars(config).items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)  # the ratio must be 1 at unchanged weights
    window = getattr(config, "sliding_window", None) if "sliding_attention" in (getattr(config, "layer_types", None) or ()) else None
    unusual = [name for name in ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling") if getattr(config, name, None)]
    if window or unusual:
        what = ", ".join(unusual) or f"a sliding window of {window}"
        raise UserError(f"The model {path} has {what}, which the training forward pass leaves out; take another model.")
    loader = AutoModelForCausalLM if kind is Policy else AutoModel
    backbone = loader.from_pretrained(path, config=config, dtype="auto")
    if grad_checkpoint and trained:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = Policy(backbone, **policy_options) if kind is Policy else Critic(backbone, config.get_text_config().hidden_size)
    module.train(trained).requires_grad_(trained)
    return shard(module, ranks, torch.float32 if trained or not ranks.cuda else torch.bfloat16)


def shard(module: Policy | Critic, ranks: Ranks, dtype=torch.float32) -> nn.Module:
    """FSDP2 with masters of `dtype`; the compute is bf16 on CUDA, but for the critic's head."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if ranks.cuda else MixedPrecisionPolicy()
    for layer in module.backbone.layers:
        fully_shard(layer.to(dtype), mesh=ranks.mesh, mp_policy=mixed)
    if isinstance(module, Critic):
        fully_shard(module.head.to(dtype), mesh=ranks.mesh)
    # The root (embedding, norm, head) is freed after a forward pass, too: the reference never sees a backward pass.
    return fully_shard(module.to(dtype), mesh=ranks.mesh, mp_policy=mixed, reshard_after_forward=True)


def full_weights(policy: Policy):
    """(checkpoint name, full tensor) of every parameter; every rank must walk through all of them."""
    for name, p in policy.lm.named_parameters():
        yield name, p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()


def model_path(model: str) -> str:
    """A folder, a folder of this project, or else a hub name."""
    return str(ROOT / model) if not os.path.exists(model) and (ROOT / model).exists() else model


def tokenizer_and_context(path: str):
    """The tokenizer, with a chat template, and the most tokens that the model can read."""
    try:
        tokenizer, config = AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as e:
        why = str(e).strip().split("\n")[0].rstrip(".")
        remedy = "give a hub name or a folder with config, weights and tokenizer"
        raise UserError(f"The model {path} cannot be loaded ({why}); {remedy}.") from e
    render(tokenizer, [{"role": "user", "content": "?"}])  # refuses a model without chat template
    return tokenizer, config.get_text_config().max_position_embeddings


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


# ----------------------------------------------------------------------------------------------------- micro-batches


def plan_pass(lengths, *, size: int, world: int, budget: int, seed: tuple) -> list:
    """Mini-batches of one pass: plan[m][rank] = list of micro-batches, each a list of row numbers.

    Rows are permuted by `seed` and cut into ceil(N/size) mini-batches whose sizes differ by at most 1; each is dealt to
    the ranks by token count, longest first, and packed into micro-batches of at most `budget` tokens (or one row). All
    ranks get the same number; an empty list stands for a filler.
    """
    lengths = np.asarray(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    plan = []
    for rows in np.array_split(order, -(-len(order) // size)):
        shares, load = [[] for _ in range(world)], [0] * world
        for row in sorted(rows.tolist(), key=lambda r: (-lengths[r], r)):
            lightest = load.index(min(load))
            shares[lightest].append(row)
            load[lightest] += int(lengths[row])
        packed = []
        for share in shares:
            micro, room = [], 0
            for row in share:
                if lengths[row] > room or not micro:
                    micro.append([])
                    room = budget
                micro[-1].append(row)
                room -= lengths[row]
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
    return critic(batch["ids"], batch["index"] if value_at == "tokens" else batch["index"][:, :1])


# -------------------------------------------------------------------------------------------------------- checkpoints


def state_of(module, optimizer) -> dict:
    """What a checkpoint holds of one model and its optimizer."""
    fresh = not optimizer.state
    model, state = get_state_dict(module, optimizer)
    if fresh:  # torch has made the moments by a step of its own, which must not count in Adam's bias correction
        for moments in optimizer.state.values():
            moments["step"].zero_()
    return {"model": model, "optimizer": state}


def save_checkpoint(folder: Path, iteration: int, algo: str, models, optimizers, ranks: Ranks):
    """checkpoints/NNNNNN, written under a temporary name and renamed when whole; the last two are kept."""
    final, temporary = folder / f"{iteration:06d}", folder / f".{iteration:06d}.tmp"
    if ranks.gather(final.exists())[0]:  # one answer for all: another machine's view of the folder may be old
        return
    error = None
    try:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        ranks.barrier()
        state = {part: state_of(models[part], opt) for part, opt in optimizers.items()}
        dcp.save(state, checkpoint_id=temporary, process_group=ranks.objects if not ranks.cuda else None)
        if ranks.rank == 0:
            (temporary / "meta.json").write_text(json.dumps({"algo": algo, "iteration": iteration, "world": ranks.world}))
    except (OSError, dcp.api.CheckpointException) as e:
        error = str(e).strip().split("\n")[-1]
    errors = [e for e in ranks.gather(error) if e]
    if errors:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        last = max((p.name for p in folder.glob("[0-9]*")), default="none")
        raise UserError(
            f"The checkpoint of iteration {iteration} could not be written to {folder} ({errors[0]}); make room and continue "
            f"with --resume {folder.parent} (last good checkpoint: {last})."
        )
    if ranks.rank == 0:
        os.rename(temporary, final)
        for old in sorted(folder.glob("[0-9]*"))[:-2]:
            shutil.rmtree(old)
    ranks.barrier()


def load_checkpoint(folder: Path, algo: str, models, optimizers) -> int:
    """Loads the last whole checkpoint; returns its iteration (0: there is none yet). Any number of ranks may read it."""
    good = sorted(p for p in folder.glob("[0-9]*") if (p / "meta.json").exists())
    if not good:
        return 0
    meta = json.loads((good[-1] / "meta.json").read_text())
    if meta["algo"] != algo:
        raise UserError(f"{good[-1]} is a checkpoint of {meta['algo']}, not of {algo}; give --algo {meta['algo']} or another folder.")
    for part, opt in optimizers.items():
        state = {part: state_of(models[part], opt)}
        dcp.load(state, checkpoint_id=good[-1])
        set_state_dict(models[part], opt, model_state_dict=state[part]["model"], optim_state_dict=state[part]["optimizer"])
    return meta["iteration"]


def export(folder: Path, policy: Policy, tokenizer, run: dict, ranks: Ranks):
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
        model.generation_config = policy.lm.generation_config  # config.json does not hold all of a model's end tokens
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        (temporary / "run.json").write_text(json.dumps(run, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    ranks.barrier()
