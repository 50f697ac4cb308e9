"""Makes the small agent in `mini/agent` from nothing: demonstrations, tokenizer, behaviour cloning.

    python -m mini.warm_start                                       # the agent that ships with the project
    python -m mini.warm_start --updates 6000 --out runs/cloned      # the same, cloned to the end: for comparison

1. Demonstrations: the package's handcoded expert plays games of train rooms that are made for this. Its replies are given the sub-goal as
   a think text, and at three of four arrivals it examines the place once more, though it has just been told what is there.
2. Tokenizer: byte-level BPE on these prompts and replies. Digits stay single. The lines that are the same in every prompt become one
   token each, which makes a prompt three times shorter: at this size, tokens are what time goes into.
3. Behaviour cloning of a Qwen2-shaped model from random weights, stopped after one pass: it knows the form of a reply and half of the
   game, and has its teacher's habit; the rest is left to reinforcement learning.

Prompts come from `envs.build_messages` and `envs.render` only, so they are the ones that training shows. No room of the held-out split
(valid_unseen) is ever opened here.
"""

import argparse
import json
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

import envs
from mini import alfworld_games

STYLE = "think_action"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<action>", "</action>")
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
BARE_COMMANDS = ("inventory", "look")
CONTEXT = 1024  # tokens


# ---------------------------------------------------------------- demonstrations


def think(subgoal, previous, game, feedback, command):
    """What the expert says before it acts: nothing while it carries on opening and closing, a few words on the way, a sentence when
    something new begins. subgoal, previous: (verb, thing) of this step and the last; game: traj_data's pddl_params, lower case.

    A search names the thing before it says whether it is there: whoever has just written the name needs to look for that name alone.
    The other way round ("i see mug 1. take the mug"), a model cloned for 1,600 updates won 40 % of 400 games; this way, 53 % after 1,000.
    """
    verb, thing = subgoal
    held, goal, lamp = game["object_target"], game["parent_target"], game["toggle_target"]
    what = {
        ("find", held): f"find a {held}",
        ("take", held): f"find a {held}",
        ("find", goal): f"bring the {held} to the {goal}",
        ("put", goal): f"put the {held} on the {goal}",
        ("find", lamp): f"find the {lamp}",
        ("use", lamp): f"look at the {held} under the {lamp}",
    }.get(subgoal, f"{verb} the {thing}" if verb != "goto" else f"go to the {thing}")
    if verb == "take":
        return f"{what}: i see {' '.join(command.split()[1:3])}" if command.startswith("take") else what
    if previous is None:
        return f"first {what}"
    if subgoal != previous:
        return f"done. now {what}"
    return "" if feedback.endswith("closed.") else what


def demonstrate(tasks, *, hesitation=0.75, progress=True):
    """Plays the tasks with the expert; [(messages, reply)] of all steps, in order. Raises ValueError where the expert does not win.

    hesitation: share of the arrivals at which it examines the place again before it goes on. That tells nothing new and costs a step:
    a habit which is easy to copy, and for reinforcement learning to give up.
    """
    env, steps = envs.ALFWorld(), []
    for task in tqdm(tasks, desc="demonstrations", unit="game", disable=not progress):
        state, history, previous, rng = env.reset(task, 0), [], None, random.Random(task.id)
        game = alfworld_games.read_params(task.data["game"])
        expert = alfworld_games.Expert(task.data["game"], state.observation)
        while not state.done:
            command = expert.act(state.observation, state.admissible)
            stuck = "look" in (command, history[-1][1] if history else "")  # looking about and then a random try
            thoughts = {command: think(expert.subgoal, previous, game, state.observation, command)}
            if state.observation.startswith("You arrive at ") and rng.random() < hesitation:
                thoughts = {history[-1][1].replace("go to", "examine"): "look closer", **thoughts}
            for action, thought in thoughts.items():
                if not stuck:
                    messages, _ = envs.build_messages(STYLE, env, state=state, history=history, step=len(history))
                    steps.append((messages, f"<think>{thought}</think><action>{action}</action>"))
                history.append((state.observation, action))
                state = env.step(action)
            previous = expert.subgoal
            if len(history) > 100:
                raise ValueError(f"the expert did not win {task.id}")
    env.close()
    return steps


# ---------------------------------------------------------------- tokenizer


def fixed_parts(prompts):
    """The parts that all prompts share, longest first: runs of whole lines with the newlines around them.

    prompts: rendered texts. A line is fixed when more than half of them hold it (the first step of a game shows no history), unless
    it has a digit or is a command: commands must have the same tokens in the prompt's list and in a reply.
    """
    count = {}
    for text in prompts:
        for line in set(re.split(r"\n|<\|\w+\|>", text)):
            count[line] = count.get(line, 0) + 1
    fixed = {line for line, n in count.items() if n > len(prompts) / 2 and not re.search(r"\d", line)}
    fixed -= {"", *BARE_COMMANDS}
    parts = set()
    for text in prompts:
        for chunk in re.split(r"<\|\w+\|>", text):
            run, lines = [], chunk.split("\n")
            for i, line in enumerate(lines + [None]):
                if line in fixed:
                    run.append(i)
                elif run:
                    before, after = "\n" * (run[0] > 0), "\n" * (run[-1] < len(lines) - 1)
                    parts.add(before + "\n".join(lines[j] for j in run) + after)
                    run = []
    return sorted(parts, key=len, reverse=True)


def leads(texts, number=40):
    """The digits with a space before them (" 1") and the most frequent phrases of two words or more before a numbered thing ("go to",
    ", you see a"). With these a command has the same few pieces wherever it stands."""
    count = Counter(phrase for text in texts for phrase in re.findall(r"([^\d\n]+?)(?= [a-z]+ \d)", text))
    frequent = [phrase for phrase, _ in count.most_common() if " " in phrase.strip()]
    return [f" {digit}" for digit in range(10)] + frequent[:number]


def make_tokenizer(steps, vocabulary=1024):
    """Trains the tokenizer on the demonstrations -> Qwen2Tokenizer with its chat template. The same steps give the same one.

    AutoTokenizer gives a Qwen2-shaped model the way of Qwen2 to cut text into words whatever its files say, so that is the one used here;
    longer pieces are added tokens, which every version keeps.
    """
    blank = Qwen2Tokenizer(chat_template=TEMPLATE)
    prompts = [blank.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for messages, _ in steps]
    fixed = [*fixed_parts(prompts), *TAGS]
    cut = re.compile("|".join(map(re.escape, [*fixed, *CONTROL])))
    texts = [text for prompt, (_, reply) in zip(prompts, steps) for text in cut.split(prompt) + cut.split(reply) if text]
    added = [*fixed, *leads(texts)]
    cut = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))

    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = blank.backend_tokenizer.normalizer, blank.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(added), special_tokens=list(CONTROL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator((piece for text in texts for piece in cut.split(text) if piece), trainer)
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"], merges=[tuple(merge) for merge in trained["merges"]], chat_template=TEMPLATE, model_max_length=CONTEXT,
        eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer


# ---------------------------------------------------------------- behaviour cloning


def make_model(tokenizer, layers=3, hidden=128, intermediate=384, heads=4):
    """A Qwen2-shaped model with random weights. With two layers it won 36 % of 400 games after 1,000 updates, with three 53 %."""
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 16) * 16, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=None, use_cache=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def encode(tokenizer, steps):
    """[(prompt ids, reply ids with the end token)]"""
    replies = tokenizer([reply for _, reply in steps], add_special_tokens=False)["input_ids"]
    return [(envs.render(tokenizer, messages), [*reply, tokenizer.eos_token_id]) for (messages, _), reply in zip(steps, replies)]


def batches(examples, size, rng):
    """Endless batches of similar length, in random order: little padding, and causal attention needs no mask for what is on the right."""
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for i in range(0, len(order), 16 * size):
            near = sorted(order[i : i + 16 * size], key=lambda j: len(examples[j][0]) + len(examples[j][1]))
            chunks = [near[k : k + size] for k in range(0, len(near), size)]
            rng.shuffle(chunks)
            yield from ([examples[j] for j in chunk] for chunk in chunks)


def clone(model, examples, *, updates, seed=0, size=16, lr=3e-3, prompt_weight=1.0, progress=True):
    """Behaviour cloning, in place: cross-entropy on replies, and on prompts, which teach it to copy names from what it has read.

    The learning rate rises for 20 updates and falls in a line to a tenth.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    source = batches(examples, size, random.Random(seed))
    model.train()
    bar = tqdm(range(updates), desc="cloning", unit="update", disable=not progress)
    for update in bar:
        batch = next(source)
        width = max(len(prompt) + len(reply) for prompt, reply in batch)
        ids = torch.tensor([prompt + reply + [0] * (width - len(prompt) - len(reply)) for prompt, reply in batch])  # (B, T)
        start, length = (torch.tensor([len(part) for part in column])[:, None] for column in zip(*batch))
        place = torch.arange(1, width)  # of the token that is predicted
        in_reply = (place >= start) & (place < start + length)  # (B, T-1)
        in_prompt = place < start
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(in_reply)
        loss_reply, loss_prompt = loss[in_reply].mean(), loss[in_prompt].mean()
        for group in optimizer.param_groups:
            group["lr"] = lr * min((update + 1) / 20, 1 - 0.9 * update / updates)
        optimizer.zero_grad()
        (loss_reply + prompt_weight * loss_prompt).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix(reply=f"{loss_reply.item():.3f}", prompt=f"{loss_prompt.item():.3f}")
    model.eval()


def make(out, *, games=3000, updates=2200, seed=0, progress=True):
    """All three parts; writes the agent (weights in bfloat16) to the folder `out` and returns {part: seconds}."""
    seconds, began = {}, time.monotonic()

    def done(part):
        nonlocal began
        seconds[part], began = time.monotonic() - began, time.monotonic()

    with tempfile.TemporaryDirectory() as folder:  # other games than those of the default data
        alfworld_games.generate(folder, train=games, seen=0, unseen=0, seed=1, progress=progress)
        steps = demonstrate(envs.ALFWorld.tasks("train", folder), progress=progress)
    done("demonstrations")
    tokenizer = make_tokenizer(steps)
    torch.manual_seed(seed)
    model = make_model(tokenizer)
    with tempfile.TemporaryDirectory() as folder:  # what it learns on are the ids that everyone gets who loads it
        tokenizer.save_pretrained(folder)
        model.config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = encode(tokenizer, steps)
    done("tokenizer")
    clone(model, examples, updates=updates, seed=seed, progress=progress)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    done("cloning")
    print(f"{len(steps):,} steps of {games:,} games; prompts {mean(len(p) for p, _ in examples):.0f} tokens, "
          f"replies {mean(len(r) for _, r in examples):.1f}; {len(tokenizer)} pieces, {model.num_parameters():,} parameters.")
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "agent"), help="folder to write to (default: %(default)s)")
    parser.add_argument("--games", type=int, default=3000, help="games to demonstrate, in train rooms (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=2200, help="updates of cloning; few leave a weak agent (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the batches (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order, and so the same weights, on a machine with any number of cores
    seconds = make(args.out, games=args.games, updates=args.updates, seed=args.seed)
    print(f"Agent in {args.out}. Seconds: " + ", ".join(f"{part} {time:.0f}" for part, time in seconds.items()))


if __name__ == "__main__":
    envs.run_script(main)
