"""rollout.py: the engines against a plain forward pass and against each other, and the loop with real environment processes."""

import importlib.util
import math
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from example_env import GuessNumber
from tiny import make_model, make_tokenizer
from trouble_env import Trouble

import rollout as R
from envs import Pool, Task, UserError

HAS_VLLM = importlib.util.find_spec("vllm") is not None
NEVER = frozenset()  # no end token


# ---------------------------------------------------------------- engines


def engine_kinds():
    yield "transformers"
    missing = not HAS_VLLM and os.environ.get("REQUIRE_VLLM") != "1"
    yield pytest.param("vllm", marks=pytest.mark.skipif(missing, reason="vllm is not installed"))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tied(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=tied)
    return folder


@pytest.fixture(scope="module", params=engine_kinds())
def loaded(request, folder):
    """(engine, model): an engine and the plain model whose weights it has."""
    from transformers import AutoModelForCausalLM

    engine = R.make_engine(request.param, str(folder), max_model_len=512, max_batch=8)
    assert request.param in engine.about and "as asked" in engine.about
    yield engine, AutoModelForCausalLM.from_pretrained(folder).eval()
    engine.close()


@pytest.fixture
def engine(loaded):
    return loaded[0]


@pytest.fixture
def model(loaded):
    return loaded[1]


PROMPTS = [np.random.default_rng(n).integers(0, 256, 5 + 25 * n).tolist() for n in range(12)]  # more than max_batch; blocks to cache


def play(engine, prompts=PROMPTS, *, seeds=None, max_tokens=12, temperature=0.7, top_p=1.0, eos_ids=NEVER, polls_between=1):
    """Replies in order; some are asked for while others already run."""
    samples = {}
    for n, prompt in enumerate(prompts):
        settings = {"temperature": temperature, "top_p": top_p, "seed": seeds[n] if seeds else n, "eos_ids": eos_ids}
        engine.submit(n, prompt, max_tokens=max_tokens + n % 3, **settings)
        for _ in range(polls_between if n % 4 == 3 else 0):
            samples.update(engine.poll())
    while engine.pending:
        samples.update(engine.poll())
    assert engine.poll() == []
    return [samples[n] for n in range(len(prompts))]


def plain_logits(model, prompt, ids):
    """(len(ids), V): what the model says before each of the ids."""
    with torch.no_grad():
        return model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]


def mismatch(model, samples, temperature, prompts=PROMPTS):
    """Largest difference of the samples' log-probs from those of a plain forward pass."""
    worst = 0.0
    for prompt, sample in zip(prompts, samples, strict=True):
        logps = torch.log_softmax(plain_logits(model, prompt, sample.ids) / temperature, -1)
        own = logps.gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(sample.logps)).abs().max().item())
    return worst


def test_log_probs_are_those_of_a_plain_forward_pass(engine, model):
    for temperature in (0.7, 1.0, 1.3):
        samples = play(engine, temperature=temperature)
        assert mismatch(model, samples, temperature) < 1e-5
        assert all(s.finish == "length" and len(s.ids) == 12 + n % 3 for n, s in enumerate(samples))


def test_greedy_takes_the_largest_logit(engine, model):
    samples = play(engine, temperature=0.0)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert plain_logits(model, prompt, sample.ids).argmax(-1).tolist() == sample.ids
    assert mismatch(model, samples, 1.0) < 1e-5


def test_sampling_follows_the_model_and_nothing_else(engine, model):
    """generation_config.json asks for top-k 1, a temperature of 0.05, a penalty and other end tokens: none of it may act."""
    prompt, n = PROMPTS[2], 600
    samples = play(engine, [prompt] * n, temperature=1.0, max_tokens=1)
    firsts = np.bincount([s.ids[0] for s in samples], minlength=model.config.vocab_size)
    expected = torch.softmax(plain_logits(model, prompt, [0])[0].double(), -1).numpy() * n
    common = expected >= 5
    rest = [firsts[~common].sum()], [expected[~common].sum()]
    observed, wanted = np.append(firsts[common], rest[0]), np.append(expected[common], rest[1])
    chi2, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert freedom > 5 and chi2 < freedom + 5 * math.sqrt(2 * freedom)


def test_only_the_given_end_tokens_end_a_reply(engine):
    free = play(engine, temperature=1.3, max_tokens=150)
    ids = [i for s in free for i in s.ids]
    assert {7, 8} & set(ids) and all(s.finish == "length" for s in free), "the config's own end tokens must not end a reply"
    eos = frozenset(i for i, _ in Counter(ids).most_common(20))
    for s, whole in zip(play(engine, temperature=1.3, max_tokens=150, eos_ids=eos), free, strict=True):
        hits = [k for k, i in enumerate(whole.ids) if i in eos]
        if s.finish == "stop":
            assert s.ids[-1] in eos and not eos & set(s.ids[:-1]) and len(s.logps) == len(s.ids)
            assert s.ids == whole.ids[: hits[0] + 1], "the same seed says the same up to its end"
        else:
            assert not eos & set(s.ids)


def test_seeds_repeat_and_differ(engine):
    first, again, other = (play(engine, seeds=range(s, s + 12)) for s in (5, 5, 500))
    assert [s.ids for s in first] == [s.ids for s in again]
    assert all(a.ids != b.ids for a, b in zip(first, other, strict=True))
    same_prompt = play(engine, [PROMPTS[3]] * 8)
    assert len({tuple(s.ids[:12]) for s in same_prompt}) == 8


def test_a_reply_does_not_depend_on_its_company(engine):
    together = play(engine, polls_between=3)
    for n in (0, 5, 11):
        settings = {"temperature": 0.7, "top_p": 1.0, "seed": n, "eos_ids": NEVER}
        engine.submit("alone", PROMPTS[n], max_tokens=12 + n % 3, **settings)
        while not (done := engine.poll()):
            pass
        assert done[0][0] == "alone" and done[0][1].ids == together[n].ids
        assert np.allclose(done[0][1].logps, together[n].logps, rtol=0, atol=5e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_it(engine, model):
    for prompt, sample in zip(PROMPTS, play(engine, temperature=1.0, top_p=0.4), strict=True):
        probs = torch.softmax(plain_logits(model, prompt, sample.ids), -1)
        own = probs.gather(1, torch.tensor(sample.ids)[:, None])
        assert ((probs * (probs > own)).sum(-1) < 0.4 + 1e-5).all()


def changed(model, scale, seed):
    """The model with every weight moved."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * scale)
    return model


def test_weight_sync_moves_every_weight(engine, model, tied):
    """Also that nothing cached for the same prompts survives, and that the tied head is not left behind."""
    for seed in range(2):
        changed(model, 0.05, seed)
        assert mismatch(model, play(engine), 0.7) > 1e-2
        names = [name for name, _ in model.named_parameters()]
        assert ("lm_head.weight" in names) is not tied
        engine.load_weights((name, p.detach().clone()) for name, p in model.named_parameters())
        assert mismatch(model, play(engine), 0.7) < 1e-5


def test_weight_sync_of_a_part_is_refused(engine, model):
    for gone in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        with pytest.raises(RuntimeError, match=gone):
            engine.load_weights((name, p) for name, p in model.named_parameters() if name != gone)
    engine.load_weights(model.named_parameters())
    assert mismatch(model, play(engine), 0.7) < 1e-5


def test_a_tied_head_may_be_sent_too(engine, model):
    engine.load_weights({**dict(model.named_parameters()), "lm_head.weight": model.lm_head.weight}.items())
    assert mismatch(model, play(engine), 0.7) < 1e-5


def test_an_engine_recovers_from_broken_weights(engine, model):
    engine.load_weights((name, p * math.nan) for name, p in model.named_parameters())
    with pytest.raises(UserError, match="not finite"):
        R.check_logps(play(engine, PROMPTS[:2])[0], "here")
    engine.load_weights(model.named_parameters())
    assert mismatch(model, play(engine), 0.7) < 1e-5


def test_fewer_rows_run_at_once_where_the_context_is_long(tmp_path):
    """Otherwise 64 rows of 12,000 tokens of a 4B model would need more than a GPU's memory."""
    make_model(tmp_path)
    sizes = [R.TransformersEngine(str(tmp_path), max_model_len=n, cache_tokens=4096).max_batch for n in (16, 100, 4096, 5000)]
    assert sizes == [64, 40, 1, 1]


def test_sleep_and_wake(engine, model):
    before = play(engine)
    engine.sleep()
    engine.wake()
    engine.load_weights(model.named_parameters())
    assert play(engine) == before


def test_prompts_beyond_the_budget_of_a_poll_wait(folder):
    """More prompt tokens than one poll takes, and one prompt that alone is more."""
    engine = R.TransformersEngine(str(folder), max_model_len=512, max_batch=4, tokens_per_poll=60)
    assert max(map(len, PROMPTS)) > 60
    whole = R.TransformersEngine(str(folder), max_model_len=512)
    assert [s.ids for s in play(engine)] == [s.ids for s in play(whole)]


def test_sample_tokens_inverts_the_distribution():
    probs = torch.tensor([0.0, 0.2, 0.5, 0.0, 0.3, 0.0])
    u = torch.tensor([0.0, 0.1, 0.199, 0.201, 0.699, 0.701, 1 - 2**-53], dtype=torch.float64)
    one = torch.ones(len(u), dtype=torch.float64)
    ids, logps = R.sample_tokens(probs.log().repeat(len(u), 1), one, one, u)
    assert ids.tolist() == [1, 1, 1, 2, 2, 4, 4]
    assert torch.allclose(logps, probs[ids].log())
    ids, logps = R.sample_tokens(probs.log().repeat(len(u), 1), one, one * 0.6, u)  # 0.5 alone does not reach 0.6
    assert set(ids.tolist()) == {2, 4} and torch.allclose(logps, probs[ids].log())
    mixed = torch.tensor([0.0, 2.0], dtype=torch.float64)
    ids, logps = R.sample_tokens(probs.log().repeat(2, 1), mixed, one[:2], u[:2])
    assert ids.tolist() == [2, 1]
    halved = torch.log_softmax(probs.log() / 2, -1)
    assert torch.allclose(logps, torch.stack([probs[2].log(), halved[1]]))


def test_make_engine_says_what_is_wrong_and_why_it_chose(folder, monkeypatch):
    with pytest.raises(UserError, match="'sglang'.*auto, vllm or transformers"):
        R.make_engine("sglang", str(folder), max_model_len=64)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install vllm"):
        R.make_engine("vllm", str(folder), max_model_len=64)
    engine = R.make_engine("auto", str(folder), max_model_len=64)
    assert engine.about == "Engine: transformers on cpu (vllm is not installed)."


# ---------------------------------------------------------------- the loop

TOKENIZER = make_tokenizer()
EOS = TOKENIZER.eos_token_id


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def say(command, thought=""):
    return f"<think>{thought}</think><action>{command}</action>"


class Script:
    """An engine that answers from a function (traj, step) -> text or ids, one reply a poll."""

    def __init__(self, reply):
        self.reply, self.queue, self.asked = reply, [], []

    def submit(self, key, prompt_ids, **settings):
        step = sum(k == key for k, *_ in self.asked)
        self.asked.append((key, list(prompt_ids), settings))
        self.queue.append((key, step, settings["max_tokens"]))

    @property
    def pending(self):
        return len(self.queue)

    def poll(self):
        key, step, limit = self.queue.pop(0)
        reply = self.reply(key, step)
        ids = (encode(reply) if isinstance(reply, str) else list(reply)) + [EOS]
        finish = "stop" if len(ids) <= limit else "length"
        return [(key, R.Sample(ids[:limit], [-0.25] * len(ids[:limit]), finish))]


def tasks(n, env=GuessNumber):
    return env.tasks("train")[:n] if env is GuessNumber else [Task(f"t{i}", "trouble", {}) for i in range(n)]


def roll(engine, n=3, *, env=GuessNumber, slots=3, workers=2, assignments=None, tokenizer=TOKENIZER, **settings):
    """Play the first n tasks -> (rows, trajectories)."""
    settings = {
        "style": "think_action", "max_steps": 4, "prompt_tokens": 3000, "response_tokens": 200, "context": 4000,
        "temperature": 1.0, "run_seed": 1, "iteration": 0, "eos_ids": [EOS], **settings,
    }  # fmt: skip
    name = f"{env.__module__}:{env.__name__}"
    assignments = assignments or [R.Assignment(10 + i, i, task, 0) for i, task in enumerate(tasks(n, env))]
    pool = Pool(name, slots=slots, workers=workers, deadline=20.0)
    engine.pool = pool
    try:
        return R.rollout(engine, pool, env, tokenizer, assignments, **settings)
    finally:
        pool.close()


def test_the_ids_sampled_are_the_ids_trained_on():
    split = [*encode("<think></think><action>"), *encode("gu"), *encode("ess"), *encode(" 1</action>")]
    assert TOKENIZER.decode(split) == say("guess 1") and encode(say("guess 1")) != split
    engine = Script(lambda traj, step: split)
    rows, trajectories = roll(engine)
    assert len(rows) == sum(t.steps for t in trajectories) > 3
    asked = {(traj, step): [p for k, p, _ in engine.asked if k == traj][step] for traj, step in ((r.traj, r.step) for r in rows)}
    for row in rows:
        assert row.response_ids.tolist() == [*split, EOS] and row.action == "guess 1" and not row.invalid
        assert row.prompt_ids.tolist() == asked[row.traj, row.step]
        assert row.response_ids.dtype == row.prompt_ids.dtype == np.int32
        assert row.logp_rollout.dtype == np.float32 and row.logp_rollout.tolist() == [-0.25] * len(row.response_ids)
    assert [(r.traj, r.step) for r in rows] == sorted((r.traj, r.step) for r in rows)


def test_success_ends_the_trajectory_and_is_scaled():
    hidden = {10 + i: task.data["hidden"] for i, task in enumerate(tasks(3))}
    rows, trajectories = roll(
        Script(lambda traj, step: say(f"guess {hidden[traj]}") if step == 2 else say("guess 99")), success_reward=10.0, max_steps=3
    )
    for t, task in zip(trajectories, tasks(3), strict=True):
        # Success on the last step: terminated, not truncated.
        assert (t.task, t.kind) == (task.id, task.kind)
        assert (t.outcome, t.success, t.score, t.steps, t.terminated, t.truncated, t.failed) == (10.0, True, 1.0, 3, True, False, None)
    assert [r.reward for r in rows] == [0.0, 0.0, 10.0] * 3
    assert [r.info["score"] for r in rows] == [0.0, 0.0, 1.0] * 3
    assert rows[0].observation.startswith("A number is hidden.") and rows[1].observation == "It is lower than 99."


ODD = {
    "empty": ([], None, "no action tags"),
    "no tag": ("I do not know what to say to this, sorry", None, "no action tags"),
    "two pairs": (say("guess 98") + "<action>guess 99</action>", "guess 98", ""),
    "nested": ("<think></think><action><action>guess 98</action></action>", "<action>guess 98", ""),
    "no think": ("<action>guess 98</action>", "guess 98", "no think tags"),
    "cut emoji": (encode("<think></think>\N{GRINNING FACE}")[:-1], None, "no action tags"),
    "upper case": (say("  GUESS 98 "), "guess 98", ""),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_replies_have_one_defined_result(name):
    reply, command, problem = ODD[name]
    engine = Script(lambda traj, step: reply)
    rows, (trajectory,) = roll(engine, 1, invalid_reward=-0.5)
    assert trajectory.steps == 4 and trajectory.truncated and not trajectory.terminated
    assert trajectory.outcome == (-2.0 if problem else 0.0)
    text = TOKENIZER.decode(reply) if isinstance(reply, list) else reply
    for row in rows:
        assert row.info["problem"] == problem and row.invalid == bool(problem)
        assert row.info["sent"] == (command is not None)
        assert row.action == (text[-30:] if command is None else command)
    if command is None:
        assert [r.observation for r in rows[1:]] == ["Nothing happens."] * 3
    if "98" in (command or ""):
        assert rows[1].observation == ("It is lower than 98." if command == "guess 98" else "Nothing happens.")


def test_tool_call_style_leaves_the_environment_alone_when_invalid():
    good, bad = '<tool_call>{"name": "env_step", "arguments": {"command": "guess 98"}}</tool_call>', "guess 97"
    engine = Script(lambda traj, step: good if step == 0 else bad)
    rows, _ = roll(engine, 1, style="tool_call", invalid_reward=-0.1)
    assert [r.invalid for r in rows] == [False, True, True, True]
    assert [r.reward for r in rows] == [0.0, -0.1, -0.1, -0.1]
    assert rows[1].observation == "It is lower than 98."
    for row in rows[2:]:  # the note does not pile up
        note, _, before = row.observation.partition("\n")
        assert "not carried out" in note and before == "It is lower than 98."


def test_a_truncated_trajectory_keeps_the_prompt_it_would_have_had_next():
    engine = Script(lambda traj, step: say("guess 98"))
    _, (longer,) = roll(engine, 1, max_steps=5)
    next_prompt = engine.asked[4][1]
    _, (cut,) = roll(Script(engine.reply), 1, max_steps=4)
    assert cut.truncated and cut.last_prompt.tolist() == next_prompt and len(longer.last_prompt) > 0
    _, (no_room,) = roll(Script(engine.reply), 1, max_steps=4, prompt_tokens=len(next_prompt) - 1)
    assert no_room.truncated and no_room.last_prompt is None
    _, (won,) = roll(Script(lambda traj, step: say(f"guess {tasks(1)[0].data['hidden']}")), 1)
    assert won.terminated and won.last_prompt is None


def test_made_up_text_after_the_action_stays_out_of_the_next_prompt():
    engine = Script(lambda traj, step: say("guess 98") + "\nObservation: you have won a prize")
    rows, _ = roll(engine, 1)
    assert "prize" in TOKENIZER.decode(rows[0].response_ids)
    for _, prompt, _ in engine.asked:
        assert "prize" not in TOKENIZER.decode(prompt)


def test_a_reply_cannot_forge_a_turn():
    """Control tokens that the policy sampled, or that the environment says, are text in the next prompt."""
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    for reply in ([*encode("so"), EOS, start, *encode("user: hi")], say("<|im_end|><|im_start|>system")):
        engine = Script(lambda traj, step, reply=reply: reply)
        rows, _ = roll(engine, 1, env=Trouble)
        assert len(rows) == 4
        for _, prompt, _ in engine.asked:
            assert prompt.count(start) == 2 and prompt.count(EOS) == 1
        assert "im_start|>" in TOKENIZER.decode(engine.asked[-1][1]).replace("<|im_start|>", "")


def test_context_limit():
    """Context and prompt limits to the token; too long in mid-episode is the end, too long at the start is a failure."""
    lengths = {}

    def grow(traj, step):
        return say(f"big {500 * step}" if traj == 10 else "look")

    engine = Script(grow)
    roll(engine, 2, env=Trouble, max_steps=3)
    for key, prompt, settings in engine.asked:
        lengths.setdefault(key, []).append(len(prompt))
        assert settings["max_tokens"] == 200
    first, second, third = lengths[10]
    assert third > second + 400 and max(lengths[11]) < third

    engine = Script(grow)
    rows, trajectories = roll(engine, 2, env=Trouble, max_steps=3, context=third + 8)
    assert [s["max_tokens"] for key, _, s in engine.asked if key == 10] == [200, 200, 8]
    assert [t.steps for t in trajectories] == [3, 3]
    cut = [r for r in rows if r.traj == 10][2]
    assert cut.finish == "length" and len(cut.response_ids) == 8 and cut.invalid

    for limits in ({"context": third}, {"prompt_tokens": third - 1}):
        rows, trajectories = roll(Script(grow), 2, env=Trouble, max_steps=3, **limits)
        assert [(t.steps, t.truncated, t.terminated, t.failed) for t in trajectories] == [(2, True, False, None), (3, True, False, None)]
        assert len(rows) == 5

    for limits in ({"context": first}, {"prompt_tokens": first - 1}):
        seen = []
        rows, trajectories = roll(Script(grow), 2, env=Trouble, max_steps=3, progress=seen.append, **limits)
        assert rows == [] and len(seen) == 2
        for t in trajectories:
            assert f"{first} tokens" in t.failed and t.task in t.failed
            assert (t.steps, t.truncated, t.terminated, t.success) == (0, False, False, False)


@pytest.mark.parametrize("weird", [None, math.nan, -math.inf, math.inf, "short"])
def test_log_probs_that_cannot_be_are_an_error(weird):
    class Weird(Script):
        def poll(self):
            [(key, sample)] = super().poll()
            sample.logps[-1:] = [] if weird == "short" else [weird]
            return [(key, sample)]

    with pytest.raises(UserError, match="log-probs.*step 0.*--lr"):
        roll(Weird(lambda traj, step: say("guess 98")), 1)


def test_seeds():
    group = [R.Assignment(i, i // 2, tasks(2)[i // 2], i % 2) for i in range(4)]

    def seeds(**settings):
        engine = Script(lambda traj, step: say("guess 98"))
        roll(engine, assignments=group, max_steps=3, **settings)
        return [s["seed"] for *_, s in sorted(engine.asked, key=lambda a: a[0])]

    base = seeds()
    assert len(set(base)) == 12 and all(0 <= s < 2**63 for s in base)  # every sample and turn its own
    assert seeds(slots=1) == base and seeds(deterministic=True) == base
    assert not set(base) & (set(seeds(run_seed=2)) | set(seeds(iteration=1)))
    assert R.stable_seed(1, 0, "train/0", 0, 0) == 1524155611154299798  # the same on every machine


def test_rollouts_of_a_group_start_from_the_same_state():
    group = [R.Assignment(i, i // 3, tasks(2, Trouble)[i // 3], i % 3) for i in range(6)]
    rows, _ = roll(Script(lambda traj, step: say("look")), env=Trouble, assignments=group, max_steps=1)
    starts = {}
    for row in rows:
        starts.setdefault(row.group, set()).add(tuple(row.info["log"][:2]))  # task and seed
    assert [len(s) for s in starts.values()] == [1, 1] and starts[0] != starts[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_failures_cost_their_own_trajectory_only(deterministic):
    """An exception in one environment, a worker killed with -9, more trajectories than slots: the others go on."""
    killed = []

    def reply(traj, step):
        if traj == 11 and step == 1:
            return say("raise no such thing")
        if traj == 12 and step == 2 and not killed:
            killed.extend(pids[12])
            os.kill(killed[0], signal.SIGKILL)
        return say("look")

    pids = {}

    class Watch(Script):
        def submit(self, key, prompt_ids, **settings):
            slot = Watch.slot_of.setdefault(key, len(Watch.slot_of) % 3)
            pids[key] = [self.pool.workers[slot % len(self.pool.workers)].process.pid]
            super().submit(key, prompt_ids, **settings)

    Watch.slot_of = {10: 0, 11: 1, 12: 2}
    rows, trajectories = roll(Watch(reply), 9, env=Trouble, slots=3, workers=3, deterministic=deterministic, invalid_reward=-1.0)
    assert killed
    failed = {t.traj: t.failed for t in trajectories if t.failed}
    assert set(failed) == {11, 12}
    assert "no such thing" in failed[11] and "signal 9" in failed[12]
    assert {r.traj for r in rows} == {10, *range(13, 19)}
    assert all(t.steps == 4 and t.truncated for t in trajectories if not t.failed)
    assert all((t.steps, t.outcome, t.success) == (0, 0.0, False) for t in trajectories if t.failed)


def test_no_barrier_and_no_more_live_than_slots(tmp_path, monkeypatch):
    """While one environment is busy, the others play on; in lock-step they wait for it."""
    monkeypatch.chdir(tmp_path)  # the workers too: a name without capitals and blanks for the file
    for deterministic in (False, True):
        order, ended = [], []

        def reply(traj, step, order=order):
            order.append((traj, step))
            return say("wait others_ended" if (traj, step) == (10, 0) else "look")

        def progress(t, ended=ended):
            ended.append(t.traj)
            if len(ended) == 5:
                Path("others_ended").touch()  # it stays for the second round, where nothing could end before it

        class Watch(Script):
            most = 0

            def submit(self, key, prompt_ids, **settings):
                super().submit(key, prompt_ids, **settings)
                Watch.most = max(Watch.most, len({k for k, *_ in self.asked} - set(ended)))

            def poll(self):
                """Nobody starts before both workers, which may be slow to spawn, have shown a first prompt."""
                return super().poll() if len({k for k, *_ in self.asked}) > 1 else []

        roll(Watch(reply), 6, env=Trouble, slots=2, workers=2, deterministic=deterministic, progress=progress)
        assert Watch.most == 2
        if deterministic:
            assert ended[:2] == [10, 11] and order[:8] == [(t, s) for s in range(4) for t in (10, 11)]
        else:
            assert ended == [11, 12, 13, 14, 15, 10]


class Guessing:
    """A tokenizer under which every reply is a valid guess, so that random weights play."""

    chat_template, apply_chat_template = TOKENIZER.chat_template, staticmethod(TOKENIZER.apply_chat_template)

    def decode(self, ids):
        return say(f"guess {1 + sum(ids) % 8}")


def test_deterministic_rollouts_repeat_bitwise(tmp_path):
    make_model(tmp_path)
    engine = R.TransformersEngine(str(tmp_path), max_model_len=4000)
    group = [R.Assignment(i, i // 2, tasks(3)[i // 2], i % 2) for i in range(6)]

    def play(run_seed, deterministic=True):
        settings = {"run_seed": run_seed, "deterministic": deterministic, "response_tokens": 9, "max_steps": 5}
        rows, trajectories = roll(engine, assignments=group, slots=4, tokenizer=Guessing(), **settings)
        arrays = [(r.prompt_ids.tobytes(), r.response_ids.tobytes(), r.logp_rollout.tobytes()) for r in rows]
        return [(r.traj, r.step, *a, r.reward) for r, a in zip(rows, arrays, strict=True)], trajectories

    first, again, other = play(1), play(1), play(2)
    assert first == again and first != other
    assert any(t.success for t in first[1]) and any(t.steps == 5 for t in first[1])
    loose, _ = play(1, deterministic=False)
    assert [r[:4] for r in loose] == [r[:4] for r in first[0]]  # the same up to float noise


def test_memory_of_many_rollouts_stays_flat(tmp_path):
    import resource

    make_model(tmp_path)
    engine = R.TransformersEngine(str(tmp_path), max_model_len=512, max_batch=8)
    play(engine)
    shape, peak = engine.kv.shape, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        play(engine, max_tokens=3)
    assert engine.kv.shape == shape and engine.kv.shape[2] == 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 30_000  # KiB
