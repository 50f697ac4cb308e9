"""train.py and model.py: micro-batches, the models, gradients that do not depend on the split, resume, export, bad input."""

import copy
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_worker import gradients, make_rows
from tiny_agent import tiny_agent
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import capo_action
import envs
import model
import train
from envs import UserError
from model import Critic, Policy, Ranks, build, collate, critic_out, plan_pass, policy_out

ROOT = Path(__file__).resolve().parent.parent
GAME = "tests.example_env:GuessNumber"
VOCABULARY = 275  # of the tiny agent

# ------------------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def ranks():
    """This process as the only rank. The names that torchrun would set do not stay for later subprocesses."""
    before = dict(os.environ)
    if dist.is_initialized():  # by an engine of another test file
        dist.destroy_process_group()
    yield Ranks()
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    return tiny_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def lm(agent):
    """The agent in float64, for comparisons; not to be changed."""
    return AutoModelForCausalLM.from_pretrained(agent, dtype=torch.float64)


def policy_like(lm, **options):
    return Policy(copy.deepcopy(lm), **options)


def environment():
    """For subprocesses: what torchrun sets in this process is not theirs."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(n):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", f"--master_port={s.getsockname()[1]}"]


def pack(rows, **columns):
    """One micro-batch of all rows on the CPU."""
    return collate(rows, range(len(rows)), columns, "cpu")


def full(p):
    """A parameter as a plain tensor of its own; FSDP leaves some unsharded after a forward pass without backward."""
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def forward(policy, batch):
    return policy(batch["ids"], batch["index"], batch["targets"], batch["compute"])


# -------------------------------------------------------------------------------------------------------- micro-batches


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=70), size=st.integers(1, 40), world=st.integers(1, 9),
    budget=st.integers(0, 200), seed=st.integers(0, 3),
)  # fmt: skip
def test_a_pass_holds_every_row_once_in_even_mini_batches(lengths, size, world, budget, seed):
    plan = plan_pass(lengths, size=size, world=world, budget=budget, seed=(seed, 1))
    rows = [[row for share in minibatch for micro in share for row in micro] for minibatch in plan]
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    assert len(plan) == math.ceil(len(lengths) / size)
    assert max(map(len, rows)) - min(map(len, rows)) <= 1 and max(map(len, rows)) <= size
    for minibatch in plan:
        assert len(minibatch) == world
        assert len({len(share) for share in minibatch}) == 1, "ranks that run different numbers of micro-batches hang"
        assert any(all(share) for share in minibatch), "a filler on every rank is wasted work"
        for micro in (micro for share in minibatch for micro in share):
            assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget
    assert plan == plan_pass(lengths, size=size, world=world, budget=budget, seed=(seed, 1))


def test_a_pass_depends_on_its_seed_and_its_minibatches_not_on_the_ranks():
    lengths = [5, 9, 3, 7, 12, 4, 8, 6, 5, 5]

    def content(world, seed):
        plan = plan_pass(lengths, size=4, world=world, budget=20, seed=seed)
        return [sorted(row for share in minibatch for micro in share for row in micro) for minibatch in plan]

    assert content(1, (1, 2)) == content(2, (1, 2)) == content(5, (1, 2))
    assert content(1, (1, 2)) != content(1, (1, 3))


def test_ranks_get_about_the_same_number_of_tokens():
    lengths = np.random.default_rng(0).integers(10, 1000, 256)
    (minibatch,) = plan_pass(lengths, size=256, world=4, budget=2000, seed=(0,))
    tokens = [sum(int(lengths[row]) for micro in share for row in micro) for share in minibatch]
    assert max(tokens) - min(tokens) < 1000


def test_masks_come_from_lengths_even_where_every_id_is_the_padding_id():
    rows = make_rows(3, vocabulary=9)
    for row, (p, r) in zip(rows, ((4, 2), (2, 5), (1, 1)), strict=True):
        row.prompt_ids, row.response_ids = np.zeros(p, np.int32), np.zeros(r, np.int32)
    batch = pack(rows, adv=[np.ones(2, np.float32), np.ones(1, np.float32), np.ones(1, np.float32)])
    assert batch["ids"].shape == (3, 7)
    assert batch["mask"].dtype == torch.bool and batch["mask"].sum(1).tolist() == [2, 5, 1]
    assert batch["mask"].equal(batch["compute"])
    assert batch["index"][0, :2].tolist() == [3, 4] and batch["index"][1].tolist() == [1, 2, 3, 4, 5] and batch["index"][2, 0] == 0
    assert batch["adv"].tolist() == [[1, 1], [1, 0], [1, 0]]


def test_targets_are_the_sampled_ids():
    rows = make_rows(6, vocabulary=VOCABULARY)
    batch = pack(rows)
    for k, row in enumerate(rows):
        assert batch["targets"][k][batch["mask"][k]].tolist() == row.response_ids.tolist()
        assert batch["ids"][k].gather(0, batch["index"][k][batch["mask"][k]] + 1).tolist() == row.response_ids.tolist()


def test_a_filler_stays_in_the_graph_and_changes_nothing(lm):
    columns = {name: [] for name in ("logp_old", "logp_ref", "adv")}
    batch = collate([], [], columns, "cpu")
    assert not batch["mask"].any() and batch["compute"].any()
    lm = copy.deepcopy(lm)
    out = forward(Policy(lm), batch)
    denom = {"policy": torch.tensor(3.0), "kl": torch.tensor(3.0), "value": torch.tensor(3.0)}
    loss, _ = capo_action.loss(out, batch, capo_action.Config(kl_coef=0.1, entropy_coef=0.1), pre=torch.tensor([0.0, 0.0]), denom=denom)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in lm.parameters())


# -------------------------------------------------------------------------------------------------------------- models


def plain_logp(lm, row, temperature):
    """One row alone, all logits at once."""
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))
    logp = F.log_softmax(lm(input_ids=ids[None]).logits[0] / temperature, dim=-1)
    at = torch.arange(len(row.prompt_ids) - 1, len(ids) - 1)
    return logp[at, ids[at + 1]], -(logp[at].exp() * logp[at]).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_plain_model_at_the_temperature(lm, chunk, temperature):
    rows = make_rows(7, vocabulary=VOCABULARY)
    batch, policy = pack(rows), policy_like(lm, temperature=temperature, chunk=chunk)
    for out in (forward(policy, batch), torch.no_grad()(forward)(policy, batch)):
        assert out["logp"].shape == out["entropy"].shape == batch["mask"].shape
        assert not out["logp"][~batch["mask"]].any() and not out["entropy"][~batch["mask"]].any()
        for k, row in enumerate(rows):
            logp, entropy = plain_logp(lm, row, temperature)
            torch.testing.assert_close(out["logp"][k][batch["mask"][k]], logp, rtol=0, atol=1e-11)
            torch.testing.assert_close(out["entropy"][k][batch["mask"][k]], entropy, rtol=0, atol=1e-11)


def test_hidden_is_the_last_state_of_the_last_prompt_token(lm):
    rows = make_rows(5, vocabulary=VOCABULARY)
    hidden = forward(policy_like(lm), pack(rows))["hidden"]
    for k, row in enumerate(rows):
        alone = lm.model(input_ids=torch.from_numpy(row.prompt_ids.astype(np.int64))[None]).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden[k], alone, rtol=0, atol=1e-11)


def test_gradients_do_not_depend_on_the_chunk_and_equal_the_plain_ones(lm):
    rows = make_rows(6, vocabulary=VOCABULARY)
    weights = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    total = sum((plain_logp(lm, row, 0.8)[0] * weights[k, : len(row.response_ids)]).sum() for k, row in enumerate(rows))
    plain = torch.autograd.grad(total, list(lm.parameters()))
    batch = pack(rows)
    for chunk in (3, 10**6):
        policy = policy_like(lm, temperature=0.8, chunk=chunk)
        logp = forward(policy, batch)["logp"]
        (logp * weights[:, : logp.shape[1]]).sum().backward()
        for a, b in zip([p.grad for p in policy.parameters()], plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def read_positions(row):
    return set(range(len(row.prompt_ids) - 1, len(row.prompt_ids) + len(row.response_ids) - 1))


def final_states(module, call):
    """The backbone's last hidden states of one call, with their gradient after backward."""
    kept = []
    handle = module.register_forward_hook(
        lambda m, a, out: (out.last_hidden_state.retain_grad(), kept.append(out.last_hidden_state)) and None
    )
    out = call()
    handle.remove()
    return out, kept[0]


def test_no_gradient_where_an_observation_or_padding_is_predicted(lm):
    rows = make_rows(6, vocabulary=VOCABULARY)
    batch, policy = pack(rows), policy_like(lm, chunk=4)
    out, states = final_states(policy.backbone, lambda: forward(policy, batch))
    (out["logp"].sum() + out["entropy"].sum()).backward()
    used = states.grad[0].abs().sum(-1) > 0  # the rows end to end, each without its last token, which predicts nothing here
    for row in rows:
        length = len(row.prompt_ids) + len(row.response_ids) - 1
        assert set(used[:length].nonzero().flatten().tolist()) == read_positions(row)
        used = used[length:]
    assert not len(used)
    assert not policy.backbone.embed_tokens.weight.grad[0].any(), "the padding id, which no row holds, must get no gradient"


def test_a_row_does_not_feel_padding_or_its_company(lm):
    rows = make_rows(4, vocabulary=VOCABULARY)
    rows[3].prompt_ids = np.random.default_rng(1).integers(1, VOCABULARY, 900).astype(np.int32)
    together, policy = pack(rows), policy_like(lm)
    critic = Critic(copy.deepcopy(lm.model), 64).double()
    torch.nn.init.normal_(critic.head.weight)
    outs = [
        forward(policy, together)["logp"],
        critic_out(critic, together, "state")["value"],
        critic_out(critic, together, "tokens")["value"],
    ]
    for k, row in enumerate(rows):
        alone, mask = pack([row]), together["mask"][k]
        for column, out in zip(
            (forward(policy, alone)["logp"], critic_out(critic, alone, "state")["value"], critic_out(critic, alone, "tokens")["value"]),
            outs, strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(out[k][mask[: out.shape[1]]], column[0], rtol=0, atol=1e-11)


class Told(torch.nn.Module):
    """A backbone whose hidden state says the position and the token there."""

    def forward(self, input_ids, position_ids, **_):
        return SimpleNamespace(last_hidden_state=torch.stack([position_ids, input_ids], -1).double())

    def set_attn_implementation(self, name):
        pass


@pytest.mark.parametrize("value_at", ["state", "tokens"])
def test_the_critic_is_read_at_the_last_prompt_token_and_before_each_response_token(value_at):
    rows = make_rows(8, vocabulary=VOCABULARY)
    critic, batch = Critic(Told(), 2).double(), pack(rows)
    for part, expected in ((0, lambda row: range(10**6)), (1, lambda row: np.concatenate([row.prompt_ids, row.response_ids]))):
        with torch.no_grad():
            critic.head.weight.copy_(torch.eye(2)[part])
        value = critic_out(critic, batch, value_at)["value"]
        assert value.shape == (8, 1 if value_at == "state" else batch["mask"].shape[1])
        for k, row in enumerate(rows):
            p, r = len(row.prompt_ids), 1 if value_at == "state" else len(row.response_ids)
            assert value[k, :r].tolist() == [expected(row)[position] for position in range(p - 1, p - 1 + r)]


def test_the_critic_starts_at_zero_and_trains_from_there(agent, ranks):
    rows = make_rows(4, vocabulary=VOCABULARY)
    critic = build(Critic, agent, ranks, trained=True)
    value = critic_out(critic, pack(rows), "state")["value"]
    assert value.shape == (4, 1) and not value.any()
    ((value - 1) ** 2).sum().backward()
    assert critic.head.weight.grad.full_tensor().abs().sum() > 0


def test_built_models_are_float32_without_dropout_whatever_the_file_holds(tmp_path, ranks):
    path = Path(tiny_agent(tmp_path, dtype=torch.bfloat16))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    for kind in (Policy, Critic):
        module = build(kind, str(path), ranks, trained=True)
        assert {p.dtype for p in module.parameters()} == {torch.float32}
        out = [tuple(module(*(pack(make_rows(3, vocabulary=VOCABULARY))[k] for k in names)).values())[0] for _ in range(2)
               for names in [("ids", "index", "targets", "compute") if kind is Policy else ("ids", "index")]]  # fmt: skip
        assert out[0].equal(out[1])
    reference = build(Policy, str(path), ranks, trained=False)
    assert not any(p.requires_grad for p in reference.parameters())


class Largest(TorchDispatchMode):
    """The largest tensor made, and the most elements of large ones that were alive at once."""

    def __init__(self, large):
        super().__init__()
        self.large, self.biggest, self.most, self.alive = large, 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.numel() >= self.large:
                storage = StorageWeakRef(x.untyped_storage())
                self.alive[storage.cdata] = (storage, x.untyped_storage().nbytes() // x.element_size())
                self.biggest = max(self.biggest, x.numel())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def test_memory_for_logits_does_not_grow_with_rows_times_vocabulary():
    vocabulary, chunk = 50_000, 16
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    policy, most = Policy(Qwen2ForCausalLM(config), chunk=chunk), []
    for n in (6, 24):
        batch = pack(make_rows(n, vocabulary=vocabulary))
        assert batch["mask"].sum() > 1.5 * chunk
        with Largest(large=vocabulary * 8 + 1) as seen:  # the weights themselves have vocabulary x 8
            out = forward(policy, batch)
            (out["logp"].sum() + out["entropy"].sum()).backward()
        assert 0 < seen.biggest <= chunk * vocabulary
        most.append(seen.most)
        policy.zero_grad()
    assert most[1] <= most[0]


# -------------------------------------------------------------------------------------------- one update, however split


def random_columns(rows, lm, *, per_token, seed=0):
    """logp_old near the model's own, so that some actions are clipped and some are not; the rest random."""
    rng = np.random.default_rng(seed)

    def draw(scale):
        return [rng.normal(0, scale, len(r.response_ids) if per_token else 1).astype(np.float32) for r in rows]

    with torch.no_grad():
        logp = [plain_logp(lm, r, 0.7)[0].numpy() for r in rows]
    near = [[(x + rng.normal(0, 0.1, len(x))).astype(np.float32) for x in logp] for _ in range(2)]
    return {"logp_old": near[0], "logp_ref": near[1], "adv": draw(1), "ret": draw(2), "value_old": draw(1)}


@pytest.fixture(scope="module")
def cases(agent, lm):
    """1, 7 and 9 rows: mini-batches of unequal size, and on two ranks filler micro-batches and a rank with no row at all."""
    made = []
    for n, size, config in (
        (7, 4, {"eps": 0.05}),
        (9, 4, {"eps": 0.05}),
        (1, 4, {"eps": 9.0, "value_clip": 99.0}),  # nothing clipped, or all is 0
        (7, 8, {"ratio": "token", "credit": "token", "token_eps": 0.05}),
    ):
        rows, config = make_rows(n, vocabulary=VOCABULARY, seed=n), {"kl_coef": 0.1, "entropy_coef": 0.01} | config
        columns = random_columns(rows, lm, per_token=config.get("credit") == "token")
        made.append({"agent": agent, "rows": rows, "columns": columns, "size": size, "config": config})
    return made


@pytest.fixture(scope="module")
def on_one_rank(cases, ranks):
    return [gradients(case, ranks, budget=10**9) for case in cases]


@pytest.fixture(scope="module")
def on_two_ranks(cases, agent, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    torch.save({"gradients": cases, "play": [1, 3], "agent": agent}, folder / "cases.pt")
    command = [*torchrun(2), "tests/ranks_worker.py", str(folder / "cases.pt"), str(folder / "results.pt")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "results.pt", weights_only=False)


def assert_equal_updates(one, other):
    (grads, metrics), (grads_other, metrics_other) = one, other
    assert grads.keys() == grads_other.keys() == {"policy", "critic"}
    for part in grads:
        assert len(grads[part]) == len(grads_other[part]) > 0
        for a, b in zip(grads[part], grads_other[part], strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert (a[name] - b[name]).abs().max() <= 1e-9 * a[name].abs().max() + 1e-15, name
        assert (
            metrics[f"{part}/grad_norm"] == pytest.approx(metrics_other[f"{part}/grad_norm"], rel=1e-9) and metrics[f"{part}/grad_norm"] > 0
        )
    assert metrics.keys() == metrics_other.keys()
    for name in metrics:
        assert metrics[name] == pytest.approx(metrics_other[name], rel=1e-5, abs=1e-9), name


def test_gradients_do_not_depend_on_micro_batches(cases, ranks, on_one_rank):
    for case, here in zip(cases, on_one_rank, strict=True):
        assert_equal_updates(here, gradients(case, ranks, budget=0))


def test_gradients_do_not_depend_on_ranks(on_one_rank, on_two_ranks):
    clipped = []
    for here, others in zip(on_one_rank, on_two_ranks["gradients"], strict=True):
        for other in others:
            assert_equal_updates(here, other)
        clipped.append(here[1]["policy/clip_frac"])
    assert any(0 < x < 1 for x in clipped), "the cases should clip some actions and leave some"


def test_two_ranks_play_every_task_once_between_them(on_two_ranks):
    for n, (rows, trajectories) in zip((1, 3), on_two_ranks["play"], strict=True):
        assert [t.traj for t in trajectories] == list(range(n)) and {r.traj for r in rows} == set(range(n))


def test_gradients_are_those_of_the_loss_written_out(cases, ranks, lm):
    """The second pass over all 7 rows at once, against autograd through the plain model."""
    case = cases[0] | {"size": 8}
    got = gradients(case, ranks, budget=60)[0]["policy"][1]
    z, old, ref = [], case["columns"]["logp_old"], case["columns"]["logp_ref"]
    total = kl = entropy = 0
    for k, row in enumerate(case["rows"]):
        logp, h = plain_logp(lm, row, 0.7)
        z.append(logp - torch.from_numpy(old[k]))
        kl, entropy = kl + capo_action.kl_penalty(logp, torch.from_numpy(ref[k])).sum(), entropy + h.sum()
    tokens = sum(map(len, z))
    mu = sum(x.detach().sum() for x in z) / tokens
    for k, x in enumerate(z):
        w, adv = torch.exp(mu + (x - mu).sum() / len(x) ** 0.5), float(case["columns"]["adv"][k][0])
        total = total - torch.minimum(w * adv, w.clamp(0.95, 1.05) * adv) / len(z)
    total = total + (0.1 * kl - 0.01 * entropy) / tokens
    for (name, _), g in zip(lm.named_parameters(), torch.autograd.grad(total, list(lm.parameters())), strict=True):
        # mu is used in float32
        assert (got[f"lm.{name}"] - g).abs().max() <= 1e-6 * g.abs().max() + 1e-12, name


def real_update(
    agent, ranks, *, lr, temperature=0.6, n=24, size=8, budget=10**9, passes=1, grad_checkpoint=False, poison=None, shift=0.0, **config
):
    """Score, credit and update as `main` does, in float32 with AdamW -> models, metrics, plans, columns, rows."""
    rows, cfg = make_rows(n, vocabulary=VOCABULARY), capo_action.Config(**config)
    models = {
        "policy": build(Policy, agent, ranks, trained=True, temperature=temperature, grad_checkpoint=grad_checkpoint),
        "critic": build(Critic, agent, ranks, trained=True, grad_checkpoint=grad_checkpoint),
        "reference": build(Policy, agent, ranks, trained=False, temperature=temperature),
    }
    optimizers = {part: torch.optim.AdamW(models[part].parameters(), lr=lr) for part in ("policy", "critic")}
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rows]
    plans = [plan_pass(lengths, size=size, world=1, budget=budget, seed=(0, p)) for p in range(passes)]
    columns = train.score(plans[0], rows, models, cfg, capo_action.NEEDS, ranks)
    columns["logp_old"] = [x - np.float32(shift) for x in columns["logp_old"]]
    trajectories = [SimpleNamespace(traj=t, outcome=0.0, truncated=False) for t in {r.traj for r in rows}]
    columns |= train.per_row(capo_action.advantages(train.as_batch(rows, trajectories, columns), cfg), rows)
    if poison is not None:
        columns["adv"][poison][:] = np.nan
        columns["ret"][poison][:] = np.nan
    before = {part: {k: full(p) for k, p in models[part].named_parameters()} for part in optimizers}
    metrics = {}
    for part, optimizer in optimizers.items():
        metrics |= train.update(part, plans, rows, columns, models[part], optimizer, capo_action, cfg, 1.0, ranks)
    return SimpleNamespace(
        models=models, before=before, metrics=metrics, plans=plans, columns=columns, rows=rows, cfg=cfg, optimizers=optimizers
    )


def test_last_values_are_the_critics_at_the_end_of_truncated_trajectories(agent, ranks):
    critic = build(Critic, agent, ranks, trained=True)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    prompts = [row.prompt_ids for row in make_rows(5, vocabulary=VOCABULARY)]
    trajectories = [SimpleNamespace(traj=10 + k, group=0, steps=2, last_prompt=p if k != 2 else None) for k, p in enumerate(prompts)]
    for cfg, budget in ((capo_action.Config(), 10**6), (capo_action.Config(credit="token"), 0)):
        got = train.last_values(trajectories, train.Settings(micro_tokens=budget), {"critic": critic}, cfg, ranks)
        assert got.keys() == {10, 11, 13, 14}
        for t in trajectories[:2] + trajectories[3:]:
            ids = torch.from_numpy(t.last_prompt.astype(np.int64))[None]
            value = critic(ids, torch.tensor([[ids.shape[1] - 1]]))["value"].item()
            assert got[t.traj] == pytest.approx(value, rel=1e-4) and value != 0
    assert train.last_values(trajectories[2:3], train.Settings(), {"critic": critic}, capo_action.Config(), ranks) == {}


@pytest.mark.parametrize("budget", [10**9, 60])
@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_z_is_bitwise_zero_at_unchanged_weights(agent, ranks, budget, grad_checkpoint):
    run = real_update(agent, ranks, lr=0.0, size=8, budget=budget, passes=1, grad_checkpoint=grad_checkpoint)
    for minibatch in run.plans[0]:
        for picks in minibatch[0]:
            batch = collate(run.rows, picks, run.columns, "cpu")
            assert forward(run.models["policy"], batch)["logp"].equal(batch["logp_old"])
            assert torch.equal(batch["logp_old"], batch["logp_ref"])
    assert run.metrics["policy/ratio"] == run.metrics["policy/ratio/max"] == 1.0 and run.metrics["policy/ratio/noise"] == 0.0
    assert run.metrics["policy/kl"] == run.metrics["policy/mu"] == run.metrics["policy/clip_frac"] == 0.0
    assert run.metrics["policy/grad_norm"] > 0, "the loss is 0 at ratio 1, its gradient is not"


def test_clipping_acts_after_a_large_step(agent, ranks):
    one = real_update(agent, ranks, lr=1e-2, size=24)
    assert one.metrics["policy/ratio/max"] == 1.0 and one.metrics["policy/clip_frac"] == 0.0
    two = real_update(agent, ranks, lr=1e-2, size=24, passes=2)
    assert two.metrics["policy/ratio/max"] > 1.001 and 0 < two.metrics["policy/clip_frac"] < 0.5  # of both passes together
    assert two.metrics["policy/mu"] != 0.0
    assert two.metrics["policy/ratio/noise"] == 0.0, "what training moves is no noise"


def test_old_log_probs_that_are_not_the_policys_show_as_noise(agent, ranks):
    """What a GPU's kernels may do to the log-probs of the same weights; here a hundredth on every token."""
    run = real_update(agent, ranks, lr=0.0, size=24, shift=0.01)
    longest = max(len(r.response_ids) for r in run.rows)
    assert run.metrics["policy/ratio/noise"] == pytest.approx(np.expm1(0.01 * longest**0.5), rel=1e-2)


def test_a_clip_range_below_the_noise_is_said_once(monkeypatch):
    monkeypatch.setattr(train, "update", lambda *_: {"policy/ratio/noise": 0.002})
    said, run = [], object.__new__(train.Run)
    run.models, run.optimizers, run.algo, run.cfg, run.s = {"policy": None}, {"policy": None}, None, capo_action.Config(), train.Settings()
    run.ranks = SimpleNamespace(say=said.append)
    assert run.update("policy", [], [], {}) == run.update("policy", [], [], {}) == {"policy/ratio/noise": 0.002}
    assert len(said) == 1 and "2.0e-03" in said[0] and "0.001" in said[0]
    run.cfg, run.warned = capo_action.Config(eps=0.01), False
    run.update("policy", [], [], {})
    assert len(said) == 1


def test_the_critic_alone_trains_while_it_warms_up(agent, ranks):
    run = real_update(agent, ranks, lr=1e-2)
    weights = {k: full(p) for k, p in run.models["policy"].named_parameters()}
    critic = {k: full(p) for k, p in run.models["critic"].named_parameters()}
    model, optimizer = run.models["critic"], run.optimizers["critic"]
    metrics = train.update("critic", run.plans, run.rows, run.columns, model, optimizer, capo_action, run.cfg, 1.0, ranks)
    assert all(full(p).equal(weights[k]) for k, p in run.models["policy"].named_parameters())
    assert any(not full(p).equal(critic[k]) for k, p in run.models["critic"].named_parameters())
    assert "policy/grad_norm" not in metrics and metrics["critic/grad_norm"] > 0


def test_a_step_with_a_nan_gradient_is_skipped_and_counted(agent, ranks):
    run = real_update(agent, ranks, lr=1e-2, size=24, poison=3)
    for part in ("policy", "critic"):
        assert run.metrics[f"{part}/steps_skipped"] == 1
        for name, p in run.models[part].named_parameters():
            assert full(p).equal(run.before[part][name])
    run = real_update(agent, ranks, lr=1e-2, size=8, poison=3)  # the two other mini-batches train
    for part in ("policy", "critic"):
        assert run.metrics[f"{part}/steps_skipped"] == 1
        assert any(not full(p).equal(run.before[part][name]) for name, p in run.models[part].named_parameters())
        assert all(full(p).isfinite().all() for p in run.models[part].parameters())


def test_small_steps_move_the_weights(agent, ranks, monkeypatch):
    """Masters are float32: a bf16 weight would swallow a step of 1e-6."""
    seen, step = {}, torch.optim.AdamW.step

    def spy(self, *args):
        seen.update({p: p.grad.full_tensor().abs() > 1e-7 for group in self.param_groups for p in group["params"]})
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run = real_update(agent, ranks, lr=1e-6, size=24, n=60)
    moved = real = 0
    for name, p in run.models["policy"].named_parameters():
        real += seen[p].sum().item()
        moved += (seen[p] & (full(p) != run.before["policy"][name])).sum().item()
    assert real > 10_000 and moved > 0.9 * real


def test_metrics_are_weighted_by_their_counts():
    parts = [
        [{"a": (10.0, 10.0), "m/max": (3.0, None)}],
        [{"a": (14.0, 2.0), "m/max": (1.0, None)}, {"a": (0.0, 0.0), "m/max": (-5.0, None)}],
    ]
    assert train.reduce_metrics(parts) == {"a": 2.0, "m/max": 3.0}


def test_a_large_mismatch_is_an_error_and_later_a_warning(ranks, capsys):
    rows = make_rows(4, vocabulary=9)
    logp = [r.logp_rollout + np.float32(5e-5) for r in rows]
    result = train.mismatch(rows, logp, train.Settings(), ranks, first=True)
    assert result["mismatch/mean"] == pytest.approx(5e-5) and "warning" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--engine"):
        train.mismatch(rows, [x + np.float32(1e-3) for x in logp], train.Settings(), ranks, first=True)
    train.mismatch(rows, [x + np.float32(1e-3) for x in logp], train.Settings(), ranks, first=False)
    assert "warning" in capsys.readouterr().out, "later in a run it must not cost what was trained"
    train.mismatch(rows, [x + np.float32(1e-3) for x in logp], train.Settings(top_p=0.9), ranks, first=True)


# ----------------------------------------------------------------------------------------------- tasks, log, checkpoints


def test_every_epoch_visits_every_task_once_and_only_the_iteration_counts():
    s = train.Settings(tasks=4, seed=3)
    batches = [train.tasks_of(list(range(10)), s, number) for number in range(1, 16)]  # 60 tasks: six epochs of ten
    flat = sum(batches, [])
    epochs = [flat[k : k + 10] for k in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch has its own order"
    assert train.tasks_of(list(range(10)), s, 7) == batches[6]
    assert train.tasks_of(list(range(10)), train.Settings(tasks=4, seed=4), 7) != batches[6]
    assert Counter(train.tasks_of([1, 2, 3], train.Settings(tasks=7), 1)).most_common()[-1][1] >= 2  # more than there are


@pytest.mark.parametrize("start, kept", [(0, []), (1, [0, 1]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_a_resumed_log_drops_what_comes_again_and_a_half_written_line(tmp_path, ranks, start, kept):
    """From a checkpoint of iteration k the next line is k + 1; without any checkpoint the run begins anew with line 0."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"iteration": n, "x": n / 3}) + "\n" for n in range(4)) + '{"iteration": 4, "x": 1.3')
    log = train.Log(path, start, ranks)
    assert log.last == ({"iteration": start, "x": start / 3} if start in kept and start else {"iteration": start})
    log.write({"iteration": start + 1 if start else 0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == kept + [start + 1 if start else 0]
    assert all(line["x"] == line["iteration"] / 3 for line in lines[:-1])
    log.write({"iteration": start + 1 if start else 0, "eval/n": 3})  # the same line, with what was missing
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == kept + [start + 1 if start else 0] and lines[-1]["eval/n"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def trained(agent, ranks, seed=0):
    """Policy, critic and optimizers that have taken a step."""
    models = {"policy": build(Policy, agent, ranks, trained=True), "critic": build(Critic, agent, ranks, trained=True)}
    optimizers = {part: torch.optim.AdamW(m.parameters(), lr=1e-3) for part, m in models.items()}
    take_step(models, optimizers, seed)
    return models, optimizers


def take_step(models, optimizers, seed):
    batch = pack(make_rows(3, vocabulary=VOCABULARY, seed=seed))
    (policy_out(models["policy"], batch)["logp"].sum() + (critic_out(models["critic"], batch, "state")["value"] - 1).sum()).backward()
    for opt in optimizers.values():
        opt.step()
        opt.zero_grad()


def weights_of(models):
    return {f"{part}.{k}": full(p) for part, m in models.items() for k, p in m.named_parameters()}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert not [k for k in a if not a[k].equal(b[k])]


def test_a_checkpoint_gives_weights_and_optimizers_back(agent, ranks, tmp_path):
    models, optimizers = trained(agent, ranks)
    model.save_checkpoint(tmp_path, 1, "capo_action", models, optimizers, ranks)
    take_step(models, optimizers, 1)
    model.save_checkpoint(tmp_path, 2, "capo_action", models, optimizers, ranks)
    saved = weights_of(models)
    take_step(models, optimizers, 2)
    after = weights_of(models)
    again, optimizers_again = trained(agent, ranks, seed=9)
    assert model.load_checkpoint(tmp_path, "capo_action", again, optimizers_again) == 2
    assert_same_weights(weights_of(again), saved)
    take_step(again, optimizers_again, 2)  # the moments too: the next step is the same
    assert_same_weights(weights_of(again), after)


def test_saving_before_the_first_step_changes_no_later_step(agent, ranks, tmp_path):
    """torch gives an optimizer that has none a state by a step of its own, which must not count in Adam's bias correction."""

    def fresh():
        models = {"policy": build(Policy, agent, ranks, trained=True), "critic": build(Critic, agent, ranks, trained=True)}
        return models, {part: torch.optim.AdamW(m.parameters(), lr=1e-3) for part, m in models.items()}

    plain, saved, loaded = fresh(), fresh(), fresh()
    model.save_checkpoint(tmp_path, 1, "capo_action", *saved, ranks)
    assert model.load_checkpoint(tmp_path, "capo_action", *loaded) == 1
    for run in (plain, saved, loaded):
        take_step(*run, 0)
    assert_same_weights(weights_of(saved[0]), weights_of(plain[0]))
    assert_same_weights(weights_of(loaded[0]), weights_of(plain[0]))


def test_the_last_two_checkpoints_stay_and_half_written_ones_are_not_read(agent, ranks, tmp_path):
    models, optimizers = trained(agent, ranks)
    assert model.load_checkpoint(tmp_path, "capo_action", models, optimizers) == 0
    for number in (1, 2, 3):
        model.save_checkpoint(tmp_path, number, "capo_action", models, optimizers, ranks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002", "000003"]
    saved = weights_of(models)
    (tmp_path / ".000004.tmp").mkdir()  # as a kill in the middle of writing leaves it
    (tmp_path / ".000004.tmp" / "__0_0.distcp").write_bytes(b"half")
    take_step(models, optimizers, 1)
    assert model.load_checkpoint(tmp_path, "capo_action", models, optimizers) == 3
    assert_same_weights(weights_of(models), saved)
    model.save_checkpoint(tmp_path, 4, "capo_action", models, optimizers, ranks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000003", "000004"]


def test_a_checkpoint_of_another_algorithm_is_refused(agent, ranks, tmp_path):
    models, optimizers = trained(agent, ranks)
    model.save_checkpoint(tmp_path, 1, "other_algo", models, optimizers, ranks)
    with pytest.raises(UserError, match="other_algo.*--algo"):
        model.load_checkpoint(tmp_path, "capo_action", models, optimizers)


def test_a_full_disk_leaves_the_last_good_checkpoint(agent, ranks, tmp_path):
    """A file system of 2 MB, where this process may mount one; elsewhere a limit on the size of a file."""
    import resource

    models, optimizers = trained(agent, ranks)
    small = tmp_path / "checkpoints"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], capture_output=True).returncode == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        model.save_checkpoint(small, 1, "capo_action", models, optimizers, ranks)
        saved = weights_of(models)
        take_step(models, optimizers, 1)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError) as error:
            for number in (2, 3, 4):
                model.save_checkpoint(small, number, "capo_action", models, optimizers, ranks)
                saved = weights_of(models)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        last = max(p.name for p in small.iterdir())
        text = str(error.value)
        assert str(small) in text and "--resume" in text and last in text and "\n" not in text
        assert "No space left" in text or "File too large" in text, text
        assert not list(small.glob(".*")), "what was half written is gone"
        assert model.load_checkpoint(small, "capo_action", models, optimizers) == int(last)
        assert_same_weights(weights_of(models), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if mounted:
            subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_loads_in_transformers_with_the_weights_and_the_prompts(tmp_path, ranks, tied):
    agent = tiny_agent(tmp_path / "agent", tied=tied)
    models, _ = trained(agent, ranks)
    tokenizer = AutoTokenizer.from_pretrained(agent)
    model.export(tmp_path / "export", models["policy"], tokenizer, {"algo": "capo_action"}, ranks)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    trained_weights = dict(models["policy"].lm.named_parameters())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, p in loaded.named_parameters():
        assert p.equal(full(trained_weights[name])), name
    batch = pack(make_rows(4, vocabulary=VOCABULARY))
    assert policy_out(Policy(loaded), batch)["logp"].equal(policy_out(models["policy"], batch)["logp"])
    env = envs.environment(GAME)
    messages, tools = envs.build_messages("think_action", env, state=env().reset(env.tasks("train")[0], 0), history=[], step=0)
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert envs.render(again, messages, tools) == envs.render(tokenizer, messages, tools)
    assert model.end_tokens(tmp_path / "export", again) == model.end_tokens(agent, tokenizer)
    assert json.loads((tmp_path / "export" / "run.json").read_text()) == {"algo": "capo_action"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["agent", "export"]


# ---------------------------------------------------------------------------------------------------------- whole runs

SMALL = [
    "--algo", "capo_action", "--preset", "mini", "--env", GAME, "--engine", "transformers", "--deterministic", "--iterations", "4",
    "--tasks", "4", "--rollouts", "1", "--max_steps", "4", "--eval_tasks", "4", "--eval_every", "2", "--minibatch", "8",
    "--save_every", "1", "--prompt_tokens", "900", "--response_tokens", "10", "--lr", "1e-3", "--temperature", "1.0",
    "--critic_warmup", "0",
]  # fmt: skip


def command(agent, out, *more, n=1):
    return [*(torchrun(n) if n > 1 else [sys.executable]), "train.py", *SMALL, "--model", agent, "--out", str(out), *more]


def resume(out, n=1):
    return [*(torchrun(n) if n > 1 else [sys.executable]), "train.py", "--resume", str(out)]


def finished(args, code=0):
    done = subprocess.run(args, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def metrics_of(out):
    """Lines of metrics.jsonl without what a clock or a memory gauge gave."""
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "tokens_per_second/", "memory_gb/"))} for line in lines]


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in children.read_text().split()] if children.exists() else []
    return found + [below for child in found for below in descendants(child)]


def started(args):
    return subprocess.Popen(args, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process, happened, seconds=240):
    until = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, f"the run ended too early:\n{process.stdout.read()[-3000:]}"
        assert time.monotonic() < until, "it did not get that far in time"
        time.sleep(0.001)


def kill_all(process):
    """kill -9 of the run and every process under it, all at the same moment."""
    family = [process.pid, *descendants(process.pid)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="module")
def whole_run(agent, tmp_path_factory):
    """A short run from start to end on one rank -> folder, what it printed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, finished(command(agent, out, "--iterations", "2")).stdout


def test_a_run_leaves_metrics_curve_checkpoints_export_and_says_what_next(whole_run, agent):
    out, said = whole_run
    assert said.startswith("preset mini (") and f"Next: python eval.py {out}/export" in said
    lines = metrics_of(out)
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert ["eval/success" in line for line in lines] == [True, False, True] and lines[0]["eval/n"] == 4
    assert lines[1].keys() <= lines[2].keys()
    expected = {
        "train/reward", "train/success", "train/steps", "train/reply_tokens", "train/invalid", "train/truncated", "policy/entropy",
        "policy/kl", "policy/clip_frac", "policy/ratio", "policy/ratio/max", "policy/mu", "policy/grad_norm", "critic/loss",
        "critic/grad_norm",
        "critic/explained_variance", "mismatch/mean", "mismatch/max",
    }  # fmt: skip
    assert expected <= lines[1].keys()
    timed = json.loads((out / "metrics.jsonl").read_text().splitlines()[1])
    assert {
        "seconds/rollout",
        "seconds/score",
        "seconds/update",
        "seconds/sync",
        "memory_gb/peak",
        "tokens_per_second/update",
    } <= timed.keys()
    assert all(math.isfinite(x) for line in lines for x in line.values())
    assert 0 <= lines[1]["mismatch/mean"] < 1e-4 and lines[1]["policy/grad_norm"] > 0
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["000001", "000002"]
    assert {"config.json", "export", "learning_curve.png", "metrics.jsonl"} <= {p.name for p in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["settings"]["lr"] == 1e-3 and config["algo"] == "capo_action" and config["config"]["eps"] == 0.02
    exported, first = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (out / "export", agent))
    assert all(not exported[k].equal(first[k]) for k in exported if k.endswith("proj.weight")), "training moved the weights"


def test_flags_that_disagree_with_the_resumed_run_are_refused(whole_run):
    out, _ = whole_run
    for flags, said in (
        (["--lr", "0.5"], "--lr 0.5"), (["--eps", "0.3"], "--eps 0.3"), (["--preset", "paper"], "--preset paper"),
        (["--env", "alfworld"], "--env alfworld"), (["--no-deterministic"], "--deterministic False"),
    ):  # fmt: skip
        with pytest.raises(UserError) as error:
            train.parse(["--resume", str(out), *flags])
        assert said in str(error.value) and str(out) in str(error.value) and "leave the flag out" in str(error.value)
    _, cfg, s, chosen = train.parse(["--resume", str(out), "--lr", "1e-3"])
    assert (s.lr, s.iterations, s.deterministic, s.out, chosen.algo, chosen.env) == (1e-3, 2, True, str(out), "capo_action", GAME)


def test_a_run_of_an_earlier_version_resumes_with_the_defaults_of_what_is_new(whole_run, tmp_path):
    """Its config.json lacks the settings that came later."""
    saved = json.loads((whole_run[0] / "config.json").read_text())
    del saved["settings"]["log_rows"], saved["config"]["critic_warmup"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    _, cfg, s, _ = train.parse(["--resume", str(tmp_path)])
    assert (s.log_rows, cfg.critic_warmup, s.lr) == (False, 0, 1e-3)
    with pytest.raises(UserError, match="--critic_warmup 2 disagrees"):
        train.parse(["--resume", str(tmp_path), "--critic_warmup", "2"])


def compare_runs(got, expected, rel=None):
    assert [line["iteration"] for line in got] == [line["iteration"] for line in expected]
    if rel is None:
        assert got == expected
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=rel or 0, abs=rel or 0)


@pytest.fixture(scope="module")
def unbroken(agent, tmp_path_factory):
    """Four iterations on two ranks in one go."""
    out = tmp_path_factory.mktemp("runs") / "unbroken"
    finished(command(agent, out, n=2))
    return metrics_of(out)


@pytest.mark.slow
def test_a_run_repeats(unbroken, agent, tmp_path):
    finished(command(agent, tmp_path / "again", n=2))
    compare_runs(metrics_of(tmp_path / "again"), unbroken)


def lines_written(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the first checkpoint", "after a line, before its checkpoint", "in an iteration"])
def test_kill_9_and_resume_equals_an_unbroken_run(unbroken, agent, tmp_path, moment):
    out = tmp_path / "run"
    run = started(command(agent, out, n=2))
    if moment == "before the first checkpoint":
        wait_for(run, lambda: lines_written(out) == 1)
    elif moment == "in an iteration":
        wait_for(run, lambda: (out / "checkpoints" / "000002").exists())
        time.sleep(0.05)
    else:
        wait_for(run, lambda: lines_written(out) == 3)
    kill_all(run)
    assert len(metrics_of(out)) < 5, "it should not have finished"
    finished(resume(out, n=2))
    compare_runs(metrics_of(out), unbroken)


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written_leaves_the_one_before(unbroken, agent, tmp_path):
    for attempt in range(4):
        out = tmp_path / f"run{attempt}"
        run = started(command(agent, out, n=2))
        wait_for(run, (out / "checkpoints" / ".000002.tmp").exists)
        kill_all(run)
        if not (out / "checkpoints" / "000002").exists():
            break
    assert (out / "checkpoints" / ".000002.tmp").exists() and (out / "checkpoints" / "000001" / "meta.json").exists()
    finished(resume(out, n=2))
    compare_runs(metrics_of(out), unbroken)
    assert not list((out / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_resume_on_another_number_of_ranks(unbroken, agent, tmp_path):
    out = tmp_path / "run"
    run = started(command(agent, out, n=2))
    wait_for(run, (out / "checkpoints" / "000002").exists)
    kill_all(run)
    finished(resume(out, n=1))
    compare_runs(metrics_of(out), unbroken, rel=1e-5)


@pytest.mark.slow
def test_contextual_credit_is_the_same_on_one_and_two_ranks(agent, tmp_path):
    """Groups of two trajectories; the projection of the features and the peers are taken over the rows of all ranks."""
    lines = []
    for n in (1, 2):
        flags = [*SMALL[:-2], "--algo", "ccpo_context", "--tasks", "4", "--rollouts", "2", "--iterations", "2"]
        launch = torchrun(n) if n > 1 else [sys.executable]
        finished([*launch, "train.py", *flags, "--model", agent, "--out", str(tmp_path / str(n))])
        lines.append(metrics_of(tmp_path / str(n)))
    compare_runs(lines[1], lines[0], rel=1e-3)
    assert lines[0][1]["credit/history"] > 0 and lines[0][1]["policy/grad_norm"] > 0
    assert not any(name.startswith("critic/") for name in lines[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["rollouts 3", "evaluation 2", "evaluation 0"])
def test_a_signal_saves_and_ends_cleanly_and_the_run_goes_on(agent, tmp_path, sig, phase):
    """One rank, so that the exit code is the run's own. Enough tasks that the signal comes in the middle of the phase."""
    more = ["--tasks", "8", "--eval_tasks", "16", "--max_steps", "6", "--iterations", "3", "--slots", "2"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    finished(command(agent, whole, *more))
    run = started(command(agent, out, *more))
    said = ""
    while phase not in said:  # the progress bar of the phase
        said += run.stdout.read(20)
        assert run.poll() is None or phase in said, said
    run.send_signal(sig)
    said += run.communicate(timeout=120)[0]
    assert run.returncode == 0, said[-3000:]
    assert "stopped after iteration" in said and f"train.py --resume {out}" in said
    done = int(said.split("stopped after iteration ")[1].split(".")[0])
    assert done < 3 and [line["iteration"] for line in metrics_of(out)] == list(range(done + 1))
    assert (out / "checkpoints" / f"{done:06d}" / "meta.json").exists()
    finished(resume(out))
    compare_runs(metrics_of(out), metrics_of(whole))


@pytest.mark.slow
def test_sigterm_to_torchrun_saves(unbroken, agent, tmp_path):
    out = tmp_path / "run"
    run = started(command(agent, out, n=2))
    wait_for(run, lambda: lines_written(out) == 2)
    run.terminate()
    said = run.communicate(timeout=120)[0]
    assert f"--nproc_per_node=2 train.py --resume {out}" in said, said[-3000:]
    finished(resume(out, n=2))
    compare_runs(metrics_of(out), unbroken)


@pytest.mark.slow
def test_eval_of_export_and_checkpoint_equals_the_runs_last_evaluation(agent, tmp_path):
    out = tmp_path / "run"
    finished(command(agent, out, "--iterations", "2", "--eval_tasks", "20", "--max_steps", "6"))
    last = metrics_of(out)[-1]
    assert 0 < last["eval/success"] < 1, "a number that a wrong agent would not hit"
    for path in (out / "export", out / "checkpoints" / "000002", out):
        finished([sys.executable, "eval.py", str(path), "--json", str(tmp_path / "result.json")])
        result = json.loads((tmp_path / "result.json").read_text())["families"]["all"]
        assert {f"eval/{k}": v for k, v in result.items()} == {k: v for k, v in last.items() if k.startswith("eval/")}
    same = [
        "--env",
        GAME,
        "--tasks",
        "20",
        "--engine",
        "transformers",
        "--max_steps",
        "6",
        "--prompt_tokens",
        "900",
        "--response_tokens",
        "10",
    ]
    finished([sys.executable, "eval.py", agent, *same, "--json", str(tmp_path / "first.json")])
    first = json.loads((tmp_path / "first.json").read_text())["families"]["all"]
    assert first["n"] == 20 and first["success"] == metrics_of(out)[0]["eval/success"]


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(argv, ranks, monkeypatch, capsys):
    """The sentence with which a run is refused, and that it happened before anything was written."""
    handlers = [(sig, signal.getsignal(sig)) for sig in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(train, "Ranks", lambda: ranks)
    try:
        with pytest.raises(UserError) as error:
            train.Run(argv)
    finally:
        for sig, handler in handlers:
            signal.signal(sig, handler)
        torch.use_deterministic_algorithms(False)
    text = str(error.value)
    assert "\n" not in text and text.rstrip().endswith((".", ")")), text
    return text


@pytest.mark.parametrize(
    "flags, value, remedy",
    [
        (["--env", "alfworld", "--data", "/no/such/folder"], "/no/such/folder", "alfworld-download"),
        (["--env", "no_such_module:Game"], "no_such_module", "check its name"),
        (["--env", "alfred"], "alfred", "module:Class"),
        (["--eval_split", "test"], "test", "valid_unseen"),
        (["--prompt_tokens", "1024"], "1024", "give at most 1023"),
        (["--model", "/no/such/model"], "/no/such/model", "hub name"),
        (["--minibatch", "0"], "--minibatch 0", "at least 1"),
        (["--save_every", "0"], "--save_every 0", "at least 1"),
        (["--eval_every", "0"], "--eval_every 0", "at least 1"),
        (["--temperature", "0"], "--temperature 0", "above 0"),
        (["--seed", "-1"], "--seed -1", "at least 0"),
        (["--out", "/proc/no/run"], "/proc/no/run", "another folder"),
    ],
)
def test_bad_input_gives_one_sentence_and_leaves_nothing(agent, ranks, tmp_path, monkeypatch, capsys, flags, value, remedy):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    text = refused([*SMALL, "--model", agent, "--out", str(tmp_path / "run"), *flags], ranks, monkeypatch, capsys)
    assert value in text and remedy in text, text
    assert not (tmp_path / "run").exists()


def test_a_model_without_chat_template_is_refused(ranks, tmp_path, monkeypatch, capsys):
    bare = tiny_agent(tmp_path / "bare", template=False)
    text = refused([*SMALL, "--model", bare, "--out", str(tmp_path / "run")], ranks, monkeypatch, capsys)
    assert bare in text and "chat template" in text and "instruct" in text
    assert not (tmp_path / "run").exists()


def test_an_empty_split_is_refused(agent, ranks, tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "json_2.1.1" / "train").mkdir(parents=True)
    flags = ["--env", "alfworld", "--data", str(tmp_path / "data")]
    text = refused([*SMALL, "--model", agent, "--out", str(tmp_path / "run"), *flags], ranks, monkeypatch, capsys)
    assert str(tmp_path / "data") in text and "mini.alfworld_games" in text
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(agent, ranks, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    text = refused([*SMALL, "--model", agent, "--out", str(tmp_path)], ranks, monkeypatch, capsys)
    assert str(tmp_path) in text and "--resume" in text
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"] and (tmp_path / "config.json").read_text() == "{}"


def test_a_top_p_below_one_is_warned_of(agent, ranks, tmp_path, monkeypatch, capsys):
    refused(
        [*SMALL, "--model", agent, "--top_p", "0.9", "--prompt_tokens", "5000", "--out", str(tmp_path / "r")], ranks, monkeypatch, capsys
    )
    assert "--top_p 0.9" in capsys.readouterr().out


def test_what_check_refuses():
    groups = SimpleNamespace(NEEDS=("groups",))
    train.check(train.Settings(tasks=3, rollouts=2, prompt_tokens=10), groups, 11, 6)
    for s, algo, context, world, said in (
        (train.Settings(tasks=3, rollouts=2), capo_action, 10**6, 4, "3 tasks x 2 rollouts"),
        (train.Settings(prompt_tokens=11), capo_action, 11, 1, "--prompt_tokens 11"),
        (train.Settings(rollouts=1), groups, 10**6, 1, "--rollouts 1"),
        (train.Settings(top_p=1.5), capo_action, 10**6, 1, "--top_p 1.5: give at most 1"),
        (train.Settings(gpu_memory=40), capo_action, 10**6, 1, "--gpu_memory 40: give at most 1"),
    ):
        with pytest.raises(UserError) as error:
            train.check(s, algo, context, world)
        assert said in str(error.value)
    train.check(train.Settings(rollouts=1), capo_action, 10**6, 1)


def test_what_the_command_line_refuses(tmp_path, capsys):
    for flags, said in (
        (["--no_such_flag", "1"], "--no_such_flag"), (["--learning_rate", "1"], "--learning_rate"), (["--iter", "3"], "--iter"),
        (["--algo", "reinforce"], "reinforce"), (["--ratio", "best"], "best"), (["--lr", "fast"], "fast"),
        (["--style", "free"], "tool_call"), (["--engine", "sglang"], "transformers"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as error:
            train.parse(flags)
        assert error.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(UserError, match="config.json.*folder of a run"):
        train.parse(["--resume", str(tmp_path)])
    for name, value, bound in (
        ("gamma", "1.01", "0 to 1"), ("lam", "-0.1", "0 to 1"), ("eps", "-0.1", "0 to inf"), ("eps", "nan", "0 to inf"),
        ("token_eps", "-1.0", "0 to inf"),
        ("kl_coef", "-0.001", "0 to inf"), ("dual_clip", "0.5", "1 to inf"), ("critic_warmup", "-1", "0 to inf"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"--{name} {value}: give a number from {bound}"):
            train.parse([f"--{name}={value}"])


def test_the_policys_learning_rate_rises_after_the_critics_iterations():
    s, cfg, without_critic = train.Settings(lr=1.0, lr_warmup=3), capo_action.Config(critic_warmup=1), SimpleNamespace()
    assert [train.learning_rate(s, cfg, number) for number in (2, 3, 4, 5, 6, 60)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [train.learning_rate(s, without_critic, number) for number in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert train.learning_rate(train.Settings(lr=0.3), without_critic, 1) == 0.3


def test_an_environment_without_settings_of_its_own_takes_those_of_alfworld_and_says_so():
    *_, chosen = train.parse(["--preset", "mini", "--env", "example_env:GuessNumber"])
    assert "alfworld" in chosen.why
    assert train.parse(["--preset", "mini"])[3].why == "--preset"


def test_every_setting_is_a_flag_and_presets_give_its_default():
    _, cfg, s, chosen = train.parse(["--preset", "paper"])
    assert (s.model, s.minibatch, s.lr, cfg.eps, chosen.preset) == ("Qwen/Qwen3-4B-Instruct-2507", 128, 1e-6, 0.001, "paper")
    _, cfg, s, chosen = train.parse(["--preset", "mini", "--lr", "0.5", "--eps", "0.25", "--gamma", "1", "--deterministic", "--tasks", "3"])
    assert (s.lr, cfg.eps, cfg.gamma, s.deterministic, s.tasks, chosen.why) == (0.5, 0.25, 1.0, True, 3, "--preset")
    for cls in (train.Settings, capo_action.Config):
        assert all(text.strip() for _, text in train.fields_with_help(cls).values())


@pytest.mark.slow
def test_bad_input_ends_the_process_with_code_2(agent, tmp_path):
    for flags, said in ((["--tasks", "3", "--rollouts", "1"], "3 tasks x 1 rollouts"), (["--no_such_flag", "1"], "--no_such_flag")):
        args = [*torchrun(2), "train.py", *SMALL, "--model", agent, "--out", str(tmp_path / "run"), *flags]
        done = subprocess.run(args, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode != 0 and said in done.stderr and "exitcode  : 2" in done.stderr
        assert not (tmp_path / "run").exists()
    done = finished(
        [sys.executable, "train.py", *SMALL, "--model", agent, "--prompt_tokens", "5000", "--out", str(tmp_path / "run")], code=2
    )
    assert done.stderr.strip().splitlines()[-1].startswith("error: --prompt_tokens 5000") and "Traceback" not in done.stderr
    done = finished([sys.executable, "eval.py", str(tmp_path), "--env", GAME], code=2)
    assert "Traceback" not in done.stderr and str(tmp_path) in done.stderr
    assert not (tmp_path / "run").exists()
