"""The data and the agent that the project makes itself: generated games, and the tokenizer and weights in mini/agent."""

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from alfworld.gen import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import envs
from mini import alfworld_games, warm_start

ROOT = Path(__file__).resolve().parent.parent
AGENT = ROOT / "mini" / "agent"
NUMBERS = {"train": 24, "valid_seen": 12, "valid_unseen": 12}


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    out = tmp_path_factory.mktemp("games")
    alfworld_games.generate(out, train=24, seen=12, unseen=12, progress=False)
    return out


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(AGENT)


@pytest.fixture(scope="module")
def demonstrations(games):
    return warm_start.demonstrate(envs.ALFWorld.tasks("train", str(games))[::2], progress=False)


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


# ---------------------------------------------------------------- games


def test_same_seed_same_games(games, tmp_path):
    alfworld_games.generate(tmp_path / "again", train=24, seen=12, unseen=12, progress=False)
    alfworld_games.generate(tmp_path / "other", train=24, seen=12, unseen=12, seed=1, progress=False)

    def read(out):
        return {str(path.relative_to(out)): path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}

    assert read(games) == read(tmp_path / "again")
    assert not set(read(games).values()) & set(read(tmp_path / "other").values())


def test_splits(games):
    """Six families in equal shares; held-out rooms apart; no game twice, in whichever split."""
    contents, rooms = [], {}
    for split, number in NUMBERS.items():
        tasks = envs.ALFWorld.tasks(split, str(games))
        assert Counter(task.kind for task in tasks) == dict.fromkeys(alfworld_games.FAMILIES, number // 6)
        contents += [json.loads(Path(task.data["game"]).read_text())["pddl_problem"] for task in tasks]
        about = [json.loads((Path(task.data["game"]).parent / "traj_data.json").read_text()) for task in tasks]
        rooms[split] = {a["scene"]["scene_num"] for a in about}
    assert len(set(contents)) == len(contents) == sum(NUMBERS.values())
    assert rooms["train"] | rooms["valid_seen"] <= set(constants.TRAIN_SCENE_NUMBERS)
    assert rooms["valid_unseen"] <= set(constants.TEST_SCENE_NUMBERS)
    assert not set(constants.TRAIN_SCENE_NUMBERS) & set(constants.TEST_SCENE_NUMBERS)


def test_expert_wins_every_game(games):
    paths = [task.data["game"] for split in NUMBERS for task in envs.ALFWorld.tasks(split, str(games))]
    steps, lucky = alfworld_games.check_games(paths, progress=False)
    assert len(steps) == 48 and sum(steps) / 48 < 13 and min(steps) >= 3  # none is won before it begins
    assert sum(lucky) < 12  # nor by chance


def test_check_names_the_game_that_is_not_won(games, monkeypatch):
    path = envs.ALFWorld.tasks("train", str(games))[0].data["game"]
    monkeypatch.setattr(alfworld_games.Expert, "act", lambda self, feedback, admissible: "look")
    with pytest.raises(ValueError, match="did not win .*game.tw-pddl"):
        alfworld_games.check_games([path], progress=False)


def test_expert_wins_whole_rooms(tmp_path):
    paths = alfworld_games.generate(tmp_path, train=6, seen=0, unseen=0, rooms="whole", progress=False)
    assert len(alfworld_games.check_games(paths, progress=False)[0]) == 6
    assert all(json.loads(Path(path).read_text())["pddl_problem"].count(" - receptacle") > 5 for path in paths)


def test_expert_plays_the_same_with_and_without_the_greeting(games):
    """ALFWorld's environment leaves the engine's greeting out; the package's expert looks for it."""
    from alfworld_fast import Game

    path = envs.ALFWorld.tasks("train", str(games))[5].data["game"]
    plans = []
    for greeting in ("-= Welcome to TextWorld, ALFRED! =-", ""):
        game, plan = Game(), []
        feedback, admissible = game.start(path)
        feedback = feedback.replace("-= Welcome to TextWorld, ALFRED! =-", greeting)
        expert, won = alfworld_games.Expert(path, feedback), False
        while not won and len(plan) < 40:
            plan.append(expert.act(feedback, admissible))
            feedback, admissible, won, _ = game.step(plan[-1])
        game.close()
        assert won
        plans.append(plan)
    assert plans[0] == plans[1]


def test_targets_start_outside_the_goal(games):
    """Enough targets lie outside receptacles of the goal's type; "pick two" needs two."""
    for split in NUMBERS:
        for task in envs.ALFWorld.tasks(split, str(games)):
            problem = json.loads(Path(task.data["game"]).read_text())["pddl_problem"]
            params = json.loads((Path(task.data["game"]).parent / "traj_data.json").read_text())["pddl_params"]
            places = re.findall(rf"\(inReceptacle {params['object_target']}_bar_\S+ (\S+?)_bar_(\S+)\)", problem)
            goal = params["parent_target"]
            kinds = [kind + "Basin" * rest.endswith("Basin") for kind, rest in places]
            assert len(kinds) >= (2 if task.kind == "pick_two_obj_and_place" else 1)
            assert goal not in kinds


def test_generate_refuses_a_folder_with_games(games):
    with pytest.raises(FileExistsError, match="choose another --out"):
        alfworld_games.generate(games, train=1)


def test_ensure_makes_it_once(tmp_path, monkeypatch):
    calls = []

    def fake(out):
        calls.append(out)
        (Path(out) / "json_2.1.1").mkdir()

    monkeypatch.setattr(alfworld_games, "generate", fake)
    out = tmp_path / "data" / "games"
    assert alfworld_games.ensure(out) == alfworld_games.ensure(out) == str(out)
    assert len(calls) == 1 and (out / "json_2.1.1").is_dir()
    assert list(out.parent.iterdir()) == [out]  # nothing half-made beside it


def test_ensure_leaves_nothing_when_it_fails(tmp_path, monkeypatch):
    def fake(out):
        (Path(out) / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(alfworld_games, "generate", fake)
    with pytest.raises(KeyboardInterrupt):
        alfworld_games.ensure(tmp_path / "games")
    assert list(tmp_path.iterdir()) == []


def test_ensure_when_another_process_was_first(tmp_path, monkeypatch):
    def fake(out):
        (Path(out) / "mine").write_text("")
        (tmp_path / "games").mkdir()
        (tmp_path / "games" / "theirs").write_text("")

    monkeypatch.setattr(alfworld_games, "generate", fake)
    assert alfworld_games.ensure(tmp_path / "games") == str(tmp_path / "games")
    assert [path.name for path in tmp_path.rglob("*")] == ["games", "theirs"]


# ---------------------------------------------------------------- the agent that ships with the project


def test_agent_is_small():
    assert sum(path.stat().st_size for path in AGENT.iterdir()) <= 2 * 2**20
    model = AutoModelForCausalLM.from_pretrained(AGENT)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings and model.config.max_position_embeddings == 1024


def test_end_token_is_everywhere_the_same(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(AGENT).eos_token_id == tokenizer.eos_token_id
    assert AutoModelForCausalLM.from_pretrained(AGENT).config.eos_token_id == tokenizer.eos_token_id


def test_control_tokens_and_tags(tokenizer):
    for text in warm_start.CONTROL:
        assert tokenizer.convert_tokens_to_ids(text) in tokenizer.all_special_ids
    for text in warm_start.TAGS:
        (i,) = tokenizer.encode(text)
        assert i not in tokenizer.all_special_ids and tokenizer.decode([i], skip_special_tokens=True) == text


def test_digits_are_single(tokenizer):
    assert all(sum(c.isdigit() for c in tokenizer.decode([i])) <= 1 for i in range(len(tokenizer)))


@pytest.mark.parametrize("text", ["", "go to cabinet 12", "¿qué? 你好 \U0001f600", "a  b\n\n c\t<x>", "on the 3rd: 1,000.5 (50%)"])
def test_text_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_loaded_tokenizer_is_the_one_that_was_trained(tokenizer, demonstrations):
    """AutoTokenizer puts Qwen2's way of cutting words in place of any other: prompts of the agent would be other ids than it was cloned on,
    longer by a fifth, and it would win nothing."""
    saved = json.loads((AGENT / "tokenizer.json").read_text())
    assert json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] == saved["pre_tokenizer"]
    lengths = [len(envs.render(tokenizer, messages)) for messages, _ in demonstrations]
    assert sum(lengths) / len(lengths) <= 120


def test_demonstrations_round_trip_and_parse(tokenizer, demonstrations):
    for messages, reply in demonstrations:
        assert tokenizer.decode(envs.render(tokenizer, messages)) == rendered(tokenizer, messages)
        assert tokenizer.decode(tokenizer.encode(reply)) == reply
        action = envs.parse_action("think_action", reply)
        assert action.valid and action.command in messages[0]["content"].split("\n")
    lengths = {len(tokenizer.encode(reply)) for _, reply in demonstrations}
    assert min(lengths) >= 6 and max(lengths) <= 30 and len(lengths) >= 6  # they really vary


def test_the_player_hesitates_at_some_arrivals_and_nothing_else_is_changed_by_it(games):
    """With 0 it plays as the expert does, with 1 it examines every place once before it does the same; a share lies between."""
    tasks = envs.ALFWorld.tasks("train", str(games))[::2]
    never, always, half = (warm_start.demonstrate(tasks, hesitation=h, progress=False) for h in (0.0, 1.0, 0.5))

    def replies(steps):
        return [reply for _, reply in steps if "<action>examine" not in reply]

    assert replies(never) == replies(always) == replies(half) and len(replies(never)) == len(never)
    arrivals = len(always) - len(never)
    assert arrivals == sum("<action>go to" in reply for _, reply in never) and 0.3 * arrivals < len(half) - len(never) < 0.7 * arrivals
    for (_, before), (messages, reply) in zip(always, always[1:]):
        if "<action>examine" in reply:
            place = re.search("<action>examine (.*)</action>", reply)[1]
            assert before.endswith(f"<action>go to {place}</action>") and f"\nexamine {place}\n" in messages[-1]["content"]


def test_the_thought_of_a_find_names_the_very_thing_that_is_taken(demonstrations):
    taken = [(reply, re.search(r"<action>take (\w+ \d+) from", reply)) for _, reply in demonstrations]
    taken = [(reply, thing[1]) for reply, thing in taken if thing]
    assert taken and all(reply.startswith(f"<think>find a {thing.split()[0]}: i see {thing}</think>") for reply, thing in taken)


def test_thoughts_have_at_most_20_tokens(tokenizer, demonstrations):
    lengths = [len(tokenizer.encode(re.search("<think>(.*)</think>", reply)[1])) for _, reply in demonstrations]
    assert min(lengths) == 0 and max(lengths) <= 20


def test_a_command_has_the_same_tokens_in_the_list_and_in_a_reply(tokenizer, demonstrations):
    for messages, reply in demonstrations:
        command = envs.parse_action("think_action", reply).command
        alone = tokenizer.encode(command)
        prompt, answer = envs.render(tokenizer, messages), tokenizer.encode(reply)

        def holds(ids, part=alone):
            return any(ids[i : i + len(part)] == part for i in range(len(ids)))

        assert holds(prompt) and holds(answer)


def test_fixed_lines_are_one_token_each(tokenizer, demonstrations):
    first, later = demonstrations[0][0], demonstrations[3][0]
    for messages, most in ((first, 12), (later, 20)):
        ids = envs.render(tokenizer, messages)
        fixed = [i for i in ids if "\n" in tokenizer.decode([i]) and len(tokenizer.decode([i])) > 3]
        assert 3 < len(fixed) <= most


def test_template_renders_several_messages(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    assert rendered(tokenizer, messages) == text + "<|im_start|>assistant\n"


def test_agent_replies_in_the_form(tokenizer, demonstrations):
    """Greedy replies of the shipped agent on prompts of games are well-formed, and many of them are admissible."""
    model = AutoModelForCausalLM.from_pretrained(AGENT, dtype=torch.float32)
    valid, admissible = 0, 0
    for messages, _ in demonstrations[:24]:
        prompt = torch.tensor([envs.render(tokenizer, messages)])
        reply = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :]
        assert reply[-1] == tokenizer.eos_token_id
        action = envs.parse_action("think_action", tokenizer.decode(reply))
        valid += action.valid
        admissible += action.command in messages[0]["content"].split("\n")
    assert valid == 24 and admissible >= 16


# ---------------------------------------------------------------- making it again


def test_no_held_out_room_is_opened(games, monkeypatch):
    """Demonstrations come from the train split alone."""
    opened = []
    start = envs.ALFWorld.reset
    monkeypatch.setattr(envs.ALFWorld, "reset", lambda self, task, seed=0: opened.append(task) or start(self, task, seed))
    monkeypatch.setattr(warm_start, "clone", lambda *args, **kwargs: None)
    warm_start.make(games / "agent", games=6, updates=1, progress=False)
    rooms = {int(re.search(r"-(\d+)/trial", task.id)[1]) for task in opened}
    assert len(opened) == 6 and all(task.id.startswith("train/") for task in opened)
    assert rooms <= set(constants.TRAIN_SCENE_NUMBERS)


def test_tokenizer_of_the_same_steps_is_the_same(demonstrations):
    one, two = (warm_start.make_tokenizer(demonstrations, 600).backend_tokenizer.to_str() for _ in range(2))
    assert one == two


def test_fixed_parts():
    prompts = [f"<|im_start|>user\nrole\nTask:\nput {i}\nMore:\n{i}\ninventory\nNow act.\nOnce.<|im_end|>\n" for i in range(4)]
    assert set(warm_start.fixed_parts(prompts)) == {"user\nrole\nTask:\n", "\nMore:\n", "\nNow act.\nOnce."}


def test_cloning_learns_replies_and_is_repeatable(tokenizer, demonstrations):
    examples = warm_start.encode(tokenizer, demonstrations[:16])

    def loss(model):
        ids = torch.tensor([examples[0][0] + examples[0][1]])
        logp = model(ids).logits.log_softmax(-1)[0, len(examples[0][0]) - 1 : -1]
        return -logp.gather(1, torch.tensor(examples[0][1])[:, None]).mean().item()

    losses = []
    for updates in (0, 12, 12):
        torch.manual_seed(0)
        model = warm_start.make_model(tokenizer, layers=1)
        warm_start.clone(model, examples, updates=updates, size=8, progress=False)
        losses.append(loss(model))
    assert losses[1] == losses[2] < losses[0] - 1


def test_batches_visit_every_example_once_a_round():
    examples = [([0] * (i % 7), [i]) for i in range(40)]
    source = warm_start.batches(examples, 8, random.Random(0))
    seen = [reply[0] for _ in range(5) for _, reply in next(source)]
    assert sorted(seen) == list(range(40))


@pytest.mark.slow
def test_warm_start_from_nothing(tmp_path):
    """The command, with few games and updates: an agent that loads and whose tokenizer cuts its own prompts."""
    command = [sys.executable, "-m", "mini.warm_start", "--out", tmp_path / "agent", "--games", "12", "--updates", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Seconds: demonstrations \d+, tokenizer \d+, cloning \d+", done.stdout)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "agent")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "agent", dtype=torch.float32)
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.slow
def test_commands_say_what_is_wrong(games):
    command = [sys.executable, "-m", "mini.alfworld_games", "--out", games, "--train", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "choose another --out" in done.stderr
