"""What the tests do on one rank in their own process, and on two under torchrun:

torchrun --nproc_per_node=2 tests/ranks_worker.py CASES RESULTS
"""

import sys

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM

import capo_action
import envs
import eval as evaluation
import rollout
import train
from model import Critic, Policy, Ranks, plan_pass, shard


def make_rows(n, *, vocabulary, seed=0):
    """n ragged rows of random ids, in trajectories of three steps."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        prompt, reply = (rng.integers(1, vocabulary, size).astype(np.int32) for size in (rng.integers(3, 30), rng.integers(1, 12)))
        logp = np.zeros(len(reply), np.float32)
        rows.append(rollout.Row(k // 3, k // 3, k % 3, prompt, reply, logp, "o", "a", float(k % 2), False, "stop", {}))
    return rows


def models_of(agent, ranks, *, temperature=0.7, chunk=5, dtype=torch.float64):
    """Policy and critic with a value head that is not zero, in float64: what differs is a fault and no rounding."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(agent, dtype=dtype), temperature=temperature, chunk=chunk)
    backbone = AutoModel.from_pretrained(agent, dtype=dtype)
    critic = Critic(backbone, backbone.config.hidden_size)
    torch.nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return {"policy": shard(policy, ranks, dtype), "critic": shard(critic, ranks, dtype)}


class Recorder:
    """In an optimizer's place: keeps the full gradients of each step and changes no weight."""

    def __init__(self, module):
        self.module, self.steps = module, []

    def step(self):
        self.steps.append({name: p.grad.full_tensor().clone() for name, p in self.module.named_parameters()})

    def zero_grad(self):
        self.module.zero_grad()


def gradients(case, ranks, *, budget):
    """Two passes of `train.update` over the case -> {part: gradients of each mini-batch}, metrics."""
    models = models_of(case["agent"], ranks)
    recorders = {part: Recorder(module) for part, module in models.items()}
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in case["rows"]]
    plans = [plan_pass(lengths, size=case["size"], world=ranks.world, budget=budget, seed=(5, p)) for p in range(2)]
    cfg = capo_action.Config(**case["config"])
    metrics = {}
    for part, module in models.items():
        options = capo_action, cfg, float("inf"), ranks
        metrics |= train.update(part, plans, case["rows"], case["columns"], module, recorders[part], *options)
    return {part: recorder.steps for part, recorder in recorders.items()}, metrics


def play(agent, ranks, n, *, copies=1, repeats=1, max_steps=2):
    """`play_all` with the agent on n training tasks of the example environment, listed `copies` times, at most two steps each."""
    from transformers import AutoTokenizer

    name = "example_env:GuessNumber"
    env, tokenizer = envs.environment(name), AutoTokenizer.from_pretrained(agent)
    engine, pool = rollout.make_engine("transformers", agent, max_model_len=1024), envs.Pool(name, slots=32, workers=1)
    try:
        return evaluation.play_all(
            engine, pool, env, tokenizer, env.tasks("train")[:n] * copies, repeats=repeats, ranks=ranks, seed=3, temperature=1.0,
            style="think_action", max_steps=max_steps, prompt_tokens=1000, response_tokens=10, context=1024,
            eos_ids=[tokenizer.eos_token_id],
        )  # fmt: skip
    finally:
        pool.close()
        engine.close()


def main(cases_file, results_file):
    ranks = Ranks()
    cases = torch.load(cases_file, weights_only=False)
    results = {"gradients": [[gradients(case, ranks, budget=budget) for budget in (10**9, 0)] for case in cases["gradients"]]}
    results["play"] = [play(cases["agent"], ranks, n) for n in cases["play"]]
    if ranks.rank == 0:
        torch.save(results, results_file)
    ranks.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
