"""analyze.py: the rows' file, each analysis against plain loops and hand-computed numbers, the page in a real browser."""

import csv
import inspect
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_repo import CHOICE, section
from tiny_agent import tiny_agent, tiny_tokenizer

import analyze
import ccpo_context
from envs import UserError
from rollout import Row, Trajectory

ROOT = Path(__file__).resolve().parent.parent
HOME = "You are in a room."

# ------------------------------------------------------------------------------------------------------ made-up rows


class Letters:
    """A tokenizer whose tokens are characters."""

    @staticmethod
    def decode(ids):
        return "".join(map(chr, ids))


def played(*trajectories):
    """Rows and trajectories from (group, outcome, [(observation, action), ...]); the reply is the action's letters."""
    rows, done = [], []
    for traj, (group, outcome, steps) in enumerate(trajectories):
        for step, (observation, action) in enumerate(steps):
            reply, last = np.array([ord(c) for c in action or "?"], np.int32), step == len(steps) - 1
            prompt = np.array([group, *map(ord, observation), step], np.int32)
            info = {"problem": "no action" if action == "" else ""}
            rows.append(Row(
                group, traj, step, prompt, reply, np.zeros(len(reply), np.float32), observation, action, outcome * last, action == "",
                "stop", info,
            ))  # fmt: skip
        won = outcome > 0
        done.append(Trajectory(traj, group, f"game-{group}", "find", outcome, won, 0.0, len(steps), won, not won, None))
    return rows, done


def credit_of(rows, **columns):
    """One number per row as columns of arrays, with log-probs for every token."""
    logp = [np.full(len(r.response_ids), -0.5, np.float32) for r in rows]
    return {"logp_old": logp} | {name: [np.array([x], np.float32) for x in column] for name, column in columns.items()}


def logged(path, trajectories, columns=None):
    """Write made-up trajectories as training does, and read them back. columns: of the rows, or a function of them."""
    rows, done = played(*trajectories)
    columns = columns(rows) if callable(columns) else credit_of(rows, **(columns or {"adv": range(len(rows))}))
    analyze.save_rows(path, rows, done, columns, Letters)
    return analyze.load_rows(path)


def ccpo_columns(rows, seed=0):
    """Columns of a ccpo_context run: hidden states at random, credit by the algorithm itself."""
    hidden = np.random.default_rng(seed).normal(size=(len(rows), 8)).astype(np.float16).astype(np.float32)
    outcome = {r.traj: r.reward for r in rows}
    batch = {
        **{name: [getattr(r, name) for r in rows] for name in ("group", "traj", "step", "reward", "invalid", "prompt_ids")},
        "obs": [r.observation for r in rows], "outcome": [outcome[r.traj] for r in rows], "hidden": hidden,
    }  # fmt: skip
    credit = ccpo_context.advantages(batch, ccpo_context.Config())
    return credit_of(rows, **{name: x[:, 0].tolist() for name, x in credit.items()}) | {"hidden": list(hidden)}


WORDS = ("go to desk 1", "take cup 1", "open box 1", "look")


def random_games(groups, seed, rollouts=4):
    rng, games = np.random.default_rng(seed), []
    for group in range(groups):
        for k in range(rollouts):
            steps = [(HOME, rng.choice(WORDS))] + [(f"At {rng.integers(3)}.", str(rng.choice(WORDS))) for _ in range(rng.integers(1, 5))]
            games.append((group, 10.0 * (k % 2), [(o, str(a)) for o, a in steps]))
    return games


def run_folder(folder, algo="ccpo_context", iterations=(1, 2, 4), groups=40, columns=ccpo_columns, config=None):
    """A run's folder with made-up rows."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"algo": algo, "env": "made_up", "config": config or {}}))
    for number in iterations:
        logged(folder / "rows" / f"{number:06d}.npz", random_games(groups, number), columns)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_folder(tmp_path_factory.mktemp("runs") / "a")


CONFIG = ccpo_context.Config()

# ----------------------------------------------------------------------------------------------------------- the file

text = st.text(max_size=8)
steps = st.lists(st.tuples(text, text), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), games=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 10.0]), steps), min_size=1, max_size=4))
def test_what_is_saved_comes_back(tmp_path_factory, data, games):
    rows, done = played(*games)
    numbers = st.floats(-4, 4, width=32)
    ragged = [np.array(data.draw(st.lists(numbers, min_size=len(r.response_ids), max_size=len(r.response_ids))), np.float32) for r in rows]
    columns = {"logp_old": ragged, "adv": [x[:1] for x in ragged], "value_old": ragged}
    shuffled = data.draw(st.permutations(range(len(rows))))
    path = tmp_path_factory.mktemp("rows") / "deeper" / "000001.npz"
    there = {name: [x[n] for n in shuffled] for name, x in columns.items()}
    analyze.save_rows(path, [rows[n] for n in shuffled], done, there, Letters)
    back = analyze.load_rows(path)
    assert set(back) == {
        "group", "traj", "step", "task", "kind", "observation", "action", "reply", "invalid", "problem", "reward", "outcome", "success",
        "truncated", "failed", "logp_old", "adv",
    }  # fmt: skip
    for n, row in enumerate(rows):
        for name in ("group", "traj", "step", "reward", "invalid", "observation", "action"):
            assert back[name][n] == getattr(row, name)
        assert back["problem"][n] == row.info["problem"]
        assert back["reply"][n] == [chr(i) for i in row.response_ids]
        t = done[row.traj]
        assert (back["task"][n], back["kind"][n]) == (t.task, t.kind)
        assert (back["outcome"][n], back["success"][n], back["truncated"][n]) == (t.outcome, t.success, t.truncated)
        for name in ("logp_old", "adv"):
            assert back[name][n].dtype == np.float32 and np.array_equal(back[name][n], columns[name][n])
    assert [p.name for p in path.parent.iterdir()] == ["000001.npz"]


def test_texts_that_no_encoding_knows_come_back(tmp_path):
    odd = "half \ud83d of a character"
    assert logged(tmp_path / "1.npz", [(0, 0.0, [(odd, odd)])])["observation"] == [odd]


def test_the_file_needs_no_pickle_and_failed_trajectories_are_counted(tmp_path):
    rows, done = played((0, 1.0, [("a", "b")]))
    done.append(Trajectory(1, 0, "game-0", "find", 0.0, False, 0.0, 0, False, False, "its environment broke"))
    analyze.save_rows(tmp_path / "1.npz", rows, done, credit_of(rows, adv=[1]), Letters)
    with np.load(tmp_path / "1.npz", allow_pickle=False) as file:
        assert all(x.dtype != object for x in dict(file).values())
    assert analyze.load_rows(tmp_path / "1.npz")["failed"] == 1


def test_rows_with_one_prompt_share_the_first_hidden_state(tmp_path):
    rows, done = played((0, 0.0, [("a", "x"), ("b", "y")]), (0, 1.0, [("a", "x"), ("b", "y")]))
    hidden = np.arange(8, dtype=np.float32).reshape(4, 2) / 3
    columns = credit_of(rows, adv=[0] * 4) | {"hidden": list(hidden)}
    backwards = {name: x[::-1] for name, x in columns.items()}
    analyze.save_rows(tmp_path / "1.npz", rows[::-1], done, backwards, Letters)
    expected = ccpo_context.shared_hidden(hidden, [r.prompt_ids for r in rows], traj=[0, 0, 1, 1], step=[0, 1, 0, 1])
    assert np.array_equal(analyze.load_rows(tmp_path / "1.npz")["hidden"], expected.astype(np.float16))
    with np.load(tmp_path / "1.npz") as file:
        assert file["hidden"].shape == (2, 2)


def test_pieces_of_a_reply_are_whole_characters():
    tokenizer = tiny_tokenizer()
    for said in ("<think></think><action>guess 3</action>", "né ☕ 👩‍🚀!", ""):
        ids = tokenizer(said + "<|im_end|>").input_ids
        pieces = analyze.reply_pieces(tokenizer.decode, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == said + "<|im_end|>" and "\N{REPLACEMENT CHARACTER}" not in pieces
    half = tokenizer("👩").input_ids[:2]  # cut by the length limit
    pieces = analyze.reply_pieces(tokenizer.decode, tokenizer("ab").input_ids + half)
    assert pieces[:3] == ["a", "b", ""] and pieces[3] == tokenizer.decode(half)
    broken = analyze.reply_pieces(tokenizer.decode, tokenizer("👩").input_ids[:1] * 9 + tokenizer("a").input_ids)
    assert broken[3] and broken[7] and broken[-1].endswith("a"), "what never becomes a character is given up after four bytes"


def test_a_full_disk_is_one_warning(tmp_path, capsys):
    rows, done = played(*random_games(30, 0))
    columns, limits = credit_of(rows, adv=range(len(rows))), resource.getrlimit(resource.RLIMIT_FSIZE)
    analyze.save_rows(tmp_path / "rows" / "1.npz", rows, done, columns, Letters)
    before = (tmp_path / "rows" / "1.npz").read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        for number in (1, 2):
            analyze.save_rows(tmp_path / "rows" / f"{number}.npz", rows, done, columns, Letters)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "warning: " in said and str(tmp_path / "rows") in said and "training goes on" in said
    assert "File too large" in said
    assert [p.name for p in (tmp_path / "rows").iterdir()] == ["1.npz"], "what was half written is gone"
    assert (tmp_path / "rows" / "1.npz").read_bytes() == before


def test_a_later_run_of_an_iteration_replaces_its_rows(tmp_path):
    for action in ("go", "look"):
        rows = logged(tmp_path / "1.npz", [(0, 0.0, [("a", action)])])
    assert rows["action"] == ["look"]


# ------------------------------------------------------------------------------------------------------------ analyses

# Two games; trajectory 1 comes back to its first observation, trajectory 2 has an invalid reply, 3 sees what no other sees.
SMALL = [
    (0, 10.0, [("hall", "go to desk 1"), ("desk", "take cup 1")]),
    (0, 0.0, [("hall", "look"), ("desk", "open box 1"), ("hall", "go to desk 1")]),
    (0, 0.0, [("hall", ""), ("shelf", "go to hall")]),
    (1, 10.0, [("hall", "look")]),
]


@pytest.fixture()
def small(tmp_path):
    return logged(tmp_path / "1.npz", SMALL, ccpo_columns)


def test_play_by_hand(small):
    found = analyze.play(small)
    assert found == {
        "trajectories": 4, "failed": 0, "success": 0.5, "truncated": 0.5, "invalid": 1 / 8, "revisits": 1 / 8, "steps": 2.0,
        "steps_per_success": 4.0,
    }  # fmt: skip


def test_without_a_success_there_are_no_steps_per_success(tmp_path):
    assert np.isnan(analyze.play(logged(tmp_path / "1.npz", [(0, 0.0, [("a", "b")])]))["steps_per_success"])


def test_credit_sizes_by_hand(tmp_path):
    games = [(0, 0.0, [("a", "x"), ("b", "y")])]
    sizes = {"adv": [1, -2], "adv_history": [1, -4], "adv_future": [0, 2], "adv_context": [1, -2], "adv_episode": [0, 0]}
    found = analyze.credit_sizes(logged(tmp_path / "1.npz", games, sizes))
    assert found.pop("A_F/A_H") == 1 / 2.5 and np.isnan(found.pop("A_CC/A_EP"))
    assert found == {"abs A": 1.5, "abs A_H": 2.5, "abs A_F": 1.0, "abs A_CC": 1.5, "abs A_EP": 0.0}
    assert analyze.credit_sizes(logged(tmp_path / "2.npz", games, {"adv": [1, -2]})) == {"abs A": 1.5}


def test_credit_per_token_counts_as_its_mean(tmp_path):
    def columns(rows):
        return credit_of(rows) | {"adv": [np.arange(len(r.response_ids), dtype=np.float32) for r in rows]}

    assert analyze.per_action(logged(tmp_path / "1.npz", [(0, 0.0, [("a", "abc"), ("b", "ab")])], columns)["adv"]).tolist() == [1.0, 0.5]


def slow_peers(rows, n, exclude_self):
    """Peers of row n by plain loops, and whether they are a fallback."""
    in_task = [v for v in range(len(rows["traj"])) if rows["group"][v] == rows["group"][n]]
    others = [v for v in in_task if rows["traj"][v] != rows["traj"][n] or not exclude_self]
    same = [v for v in others if rows["observation"][v] == rows["observation"][n]]
    return (same, False) if same else (others, bool(others))


@pytest.mark.parametrize("exclude_self", (True, False))
def test_peer_counts_against_loops(small, tmp_path, exclude_self):
    cfg = ccpo_context.Config(exclude_self=exclude_self)
    for rows in (small, logged(tmp_path / "2.npz", random_games(5, 3), ccpo_columns)):
        peers = [slow_peers(rows, n, exclude_self) for n in range(len(rows["traj"]))]
        found = analyze.peer_counts(rows, cfg)
        assert found["peers"] == pytest.approx(np.mean([len(p) for p, _ in peers]))
        assert found["fallback"] == pytest.approx(np.mean([alone for p, alone in peers if p]))
    if exclude_self:  # hall: 3 and 2 and 3 in game 0; desk: 1; shelf: the other 5; game 1: none
        found = analyze.peer_counts(small, cfg)
        assert found == {"peers": (3 + 1 + 2 + 1 + 2 + 3 + 5 + 0) / 8, "fallback": 1 / 7}
        logged_fallback = [x[0] for x in small["fallback"]]
        assert np.mean(logged_fallback[:7]) == pytest.approx(found["fallback"]), "as the algorithm logged it, for the steps with peers"


def test_a_lone_trajectory_has_no_peers(tmp_path):
    rows = logged(tmp_path / "1.npz", [(0, 10.0, [("a", "b"), ("a", "c")])], ccpo_columns)
    found, changes = analyze.peer_counts(rows, CONFIG), analyze.weight_changes(rows, CONFIG)
    assert found["peers"] == 0 and np.isnan(found["fallback"]) and changes["pairs"] == 0 and np.isnan(changes["> 1"])


def slow_shares(rows, n, summary_weight):
    """{peer: share} of row n by loops over the features' distances."""
    summary = []
    for n_row in range(len(rows["traj"])):
        earlier = [rows["observation"][m] for m in range(n_row + 1) if rows["traj"][m] == rows["traj"][n_row]]
        summary.append(ccpo_context.context_summary(earlier)[-1])
    phi = ccpo_context.context_features(rows["hidden"], np.array(summary), summary_weight=summary_weight)
    peers, fallback = slow_peers(rows, n, True)
    in_task = [v for v in range(len(phi)) if rows["group"][v] == rows["group"][n]]
    bucket = in_task if fallback else [v for v in in_task if rows["observation"][v] == rows["observation"][n]]
    pairs = [np.linalg.norm(phi[a] - phi[b]) for k, a in enumerate(bucket) for b in bucket[k + 1 :]]
    median = np.median(pairs) if np.median(pairs) > 1e-9 else 1.0
    weight = {v: np.exp(-np.linalg.norm(phi[n] - phi[v]) / (0.15 * median)) for v in peers}
    return {v: w / sum(weight.values()) for v, w in weight.items()}


def test_weight_changes_against_loops(tmp_path):
    rows = logged(tmp_path / "1.npz", random_games(4, 5), ccpo_columns)
    changes = []
    for n in range(len(rows["traj"])):
        with_it, without = slow_shares(rows, n, 1.0), slow_shares(rows, n, 0.0)
        changes += [100 * abs(with_it[v] - without[v]) for v in with_it]
    found = analyze.weight_changes(rows, CONFIG)
    assert found["pairs"] == len(changes)
    for points in (0.25, 0.5, 1, 5, 10):
        assert found[f"> {points}"] == pytest.approx(sum(c > points for c in changes) / len(changes))
    assert 0 < found["> 10"] < found["> 0.25"] <= 1
    assert analyze.weight_changes(rows, ccpo_context.Config(kernel="uniform"))["> 0.25"] == 0
    off = ccpo_context.Config(summary_weight=0.0)
    assert analyze.weight_changes(rows, off) == found, "a run without the summary is compared with one that has it"


def test_kinds_of_action(tmp_path):
    said = ("Go to desk 1", " take cup 1 from desk 1", "inventory", "", "search[red shoes]", "...")
    rows = logged(tmp_path / "1.npz", [(0, 0.0, [("a", x) for x in said])])
    assert analyze.action_kinds(rows) == ["go", "take", "inventory", "invalid", "search", "none"]


def test_relative_credit_by_hand(small, tmp_path):
    small["adv"] = [np.array([x]) for x in (3.0, 1.0, 1.0, -1.0, 2.0, -2.0, 5.0, 9.0)]
    small["adv_future"] = [2 * x for x in small["adv"]]
    found = analyze.relative_credit(small, ["adv", "adv_future"])
    # hall in game 0: go 3 and 2, look 1, invalid -2, mean 1; desk: take 1, open -1, mean 0; shelf and game 1 have nothing to match
    expected = {"go": [1.5, 3.0], "look": [0.0, 0.0], "invalid": [-3.0, -6.0], "take": [1.0, 2.0], "open": [-1.0, -2.0]}
    assert {kind: [x.tolist() for x in values] for kind, values in found.items()} == {kind: [x] for kind, x in expected.items()}
    alone = logged(tmp_path / "2.npz", [(0, 0.0, [("a", "go"), ("a", "look")]), (1, 0.0, [("a", "go")])])
    assert analyze.relative_credit(alone, ["adv"]) == {}, "the same trajectory is no match, nor is another game"
    agreed = logged(tmp_path / "3.npz", [(0, 0.0, [("a", "go north")]), (0, 0.0, [("a", "go south")])])
    assert analyze.relative_credit(agreed, ["adv"]) == {}, "one kind of action has nothing to be compared with"


def test_interval_is_the_bootstraps():
    x = np.random.default_rng(1).normal(2.0, 3.0, 400)
    mean, low, high = analyze.interval(x, comparisons=1)
    error = x.std() / 20
    assert mean == x.mean()
    assert low == pytest.approx(mean - 1.96 * error, abs=0.06 * error) and high == pytest.approx(mean + 1.96 * error, abs=0.06 * error)
    z = statistics.NormalDist().inv_cdf(1 - 0.05 / 10 / 2)
    _, low, high = analyze.interval(x, comparisons=10)  # Bonferroni: 99.5 %
    assert low == pytest.approx(mean - z * error, abs=0.15 * error) and high == pytest.approx(mean + z * error, abs=0.15 * error)
    assert [float(v) for v in analyze.interval(np.full(60, 7.0), comparisons=3)] == [7.0, 7.0, 7.0]


def test_interval_is_6000_draws_of_seed_0():
    x, rng, means = np.array([0.0, 1.0, 5.0]), np.random.default_rng(0), []
    for _ in range(6000):
        means.append(sum(x[i] for i in rng.integers(3, size=3)) / 3)
    _, low, high = analyze.interval(x, comparisons=2)
    assert (low, high) == (pytest.approx(np.quantile(means, 0.0125)), pytest.approx(np.quantile(means, 0.9875)))
    both = analyze.interval(np.stack([x, -x], 1), comparisons=2)
    assert both[1][0] == low and both[2][1] == pytest.approx(-low), "columns are drawn together"


def test_action_table_leaves_out_what_is_rare_and_corrects_for_the_rest():
    rng = np.random.default_rng(2)
    samples = {kind: list(rng.normal(size=(n, 2))) for kind, n in (("go", 60), ("take", 80), ("open", 59))}
    lines = analyze.action_table(samples, ["adv", "adv_history"])
    assert [(x["action"], x["credit"], x["groups"]) for x in lines] == [
        ("go", "adv", 60), ("go", "adv_history", 60), ("take", "adv", 80), ("take", "adv_history", 80),
    ]  # fmt: skip
    mean, low, high = analyze.interval(np.array(samples["take"])[:, 1], comparisons=4)
    assert lines[3]["mean"] == pytest.approx(mean) and (lines[3]["low"], lines[3]["high"]) == (pytest.approx(low), pytest.approx(high))
    assert analyze.action_table({"open": samples["open"]}, ["adv", "adv_history"]) == []


def test_first_steps_by_hand(small):
    assert analyze.first_steps(small) == [
        ("game-0", {"go": 1, "take": 2}),
        ("game-0", {"look": 1, "open": 2, "go": 3}),
        ("game-0", {"invalid": 1, "go": 2}),
        ("game-1", {"look": 1}),
    ]


def test_first_occurrences_are_compared_on_common_games(small):
    ours = analyze.first_steps(small)
    theirs = [("game-0", {"go": 4, "look": 2}), ("game-1", {"look": 3}), ("game-1", {"look": 6, "go": 1}), ("game-2", {"look": 50})]
    go, look = analyze.compare_first_steps(ours, theirs, least=1)
    assert (go["action"], go["games"], go["share"], go["other_share"]) == ("go", 1, 3 / 4, 2 / 3)
    assert (go["first"], go["other_first"], go["later"], go["low"], go["high"]) == (2, 4, 2, 2, 2)
    # look: game 0 first at 1 against 2, game 1 at 1 against the mean of 3 and 6
    assert (look["games"], look["first"], look["other_first"], look["later"]) == (2, 1, 3.25, 2.25)
    assert (look["low"], look["high"]) == (1, 3.5), "two games: the interval is from one to the other"
    assert [x["action"] for x in analyze.compare_first_steps(ours, theirs, least=2)] == ["look"]
    assert analyze.compare_first_steps(ours, [("game-7", {"go": 1})], least=1) == []


def test_blocks_are_means_of_consecutive_iterations():
    lines = [{"iteration": n, "x": float(n), "y": np.nan if n < 3 else 1.0} for n in range(1, 7)]
    found = analyze.blocks(lines, 3)
    assert found[0] == {"mean of iterations": "x", "1-2": 1.5, "3-4": 3.5, "5-6": 5.5}
    assert np.isnan(found[1]["1-2"]) and found[1]["3-4"] == 1.0
    assert list(analyze.blocks(lines[:1])[0]) == ["mean of iterations", "1"]


# ------------------------------------------------------------------------------------------------------- command line


def analysis(*args):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(ROOT / "analyze.py"), *map(str, args)], env=env, capture_output=True, text=True, timeout=300)


def test_all_analyses_of_a_run_and_another(run, tmp_path, capsys):
    other = run_folder(tmp_path / "other", algo="capo_action", groups=70, columns=lambda rows: credit_of(rows, adv=range(len(rows))))
    run = shutil.copytree(run, tmp_path / "run")
    for number in (5, 6):
        logged(run / "rows" / f"{number:06d}.npz", random_games(70, number), ccpo_columns)
    analyze.main([str(run), str(other)])
    said = capsys.readouterr().out
    files = {p.name for p in (run / "analysis").iterdir()}
    pictures = {f"{name}.png" for name in ("play", "credit", "peers", "weights", "actions", "first_actions-other")}
    assert files == pictures | {"tables.md", "iterations.csv", "weights.csv", "actions.csv", "first_actions-other.csv"}
    for name in pictures:
        assert (run / "analysis" / name).read_bytes().startswith(b"\x89PNG") and (run / "analysis" / name).stat().st_size > 5000
    table = list(csv.DictReader(open(run / "analysis" / "iterations.csv")))
    assert [int(x["iteration"]) for x in table] == [1, 2, 4, 5, 6]
    for line in table:
        rows = analyze.load_rows(run / "rows" / f"{int(line['iteration']):06d}.npz")
        history, future = (np.mean([abs(x[0]) for x in rows[name]]) for name in ("adv_history", "adv_future"))
        assert float(line["A_F/A_H"]) == pytest.approx(future / history)
    actions = list(csv.DictReader(open(run / "analysis" / "actions.csv")))
    assert {x["credit"] for x in actions} == {"adv", "adv_history", "adv_future"}
    assert {x["action"] for x in actions} == {"go", "take", "open", "look"}
    firsts = list(csv.DictReader(open(run / "analysis" / "first_actions-other.csv")))
    assert {x["action"] for x in firsts} == {"go", "take", "open", "look"} and all(int(x["games"]) >= 60 for x in firsts)
    for heading in ("Over training", "Peer weights", "Relative credit", "First occurrence"):
        assert said.count(f"## {heading}") >= 1 and heading in (run / "analysis" / "tables.md").read_text()
    left_out = "Left out, as the algorithm has none: advantages of history, future, context and episode; peers and their weights."
    assert said.count(left_out) == 1 and left_out in (other / "analysis" / "tables.md").read_text()
    assert not {"peers.png", "weights.csv"} & {p.name for p in (other / "analysis").iterdir()}


def test_few_games_are_said_to_be_few(tmp_path, capsys):
    for name in ("a", "b"):
        run_folder(tmp_path / name, iterations=(1,), groups=2)
    analyze.main([str(tmp_path / "a"), str(tmp_path / "b")])
    said = capsys.readouterr().out
    assert re.search(r"Relative credit of actions: left out, as it takes 60 matched groups per kind; the most here are \d\.", said)
    assert "left out, as it takes 60 games in common; there are 2." in said


def test_a_run_without_rows_names_the_remedy(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    text = f"{tmp_path} has no rows to analyse; train with --log_rows."
    done = analysis(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {text}\n")
    with pytest.raises(UserError, match=f"^{re.escape(text)}$"):
        analyze.main([str(tmp_path), "--render", str(tmp_path / "p.html")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]


def test_bad_arguments_are_one_sentence(run, tmp_path):
    page = ["--render", str(tmp_path / "p.html")]
    for args, words in (
        ([str(tmp_path)], ("config.json", "folder of a run")),
        ([str(run), *page, "--iteration", "3"], ("--iteration 3", "1 to 4")),
        ([str(run), *page, "--traj", "999"], ("--traj 999", "0 to 159")),
    ):
        with pytest.raises(UserError) as error:
            analyze.main(args)
        assert all(word in str(error.value) for word in words), error.value
    for args in ([str(run), "--traj", "1"], [str(run), str(run), *page]):
        with pytest.raises(SystemExit) as refused:
            analyze.main(args)
        assert refused.value.code == 2
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_named(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")
    path = run / "rows" / "000002.npz"
    for damage in (path.read_bytes()[:-500], b"", b"nothing of the kind"):
        path.write_bytes(damage)
        with pytest.raises(UserError, match="000002.npz is damaged .*delete it"):
            analyze.main([str(run)])


def test_choices_of_our_own_are_listed():
    source = (ROOT / "analyze.py").read_text()
    marks = {m[0] for m in re.findall(rf"^\s*# ({CHOICE})$", source, re.MULTILINE)}
    listed = [line.strip().removeprefix("- ") for line in section(inspect.getdoc(analyze), "Choices")]
    assert marks and marks == set(listed) and len(listed) == len(set(listed))


# ---------------------------------------------------------------------------------------------------------------- page

EVIL = """<script>document.body.innerHTML = "taken"</script><img src="http://example.com/x.png" onerror="alert(1)">"""


def rendered(run, target, *args):
    analyze.main([str(run), "--render", str(target), *args])
    return target.read_text()


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A run whose observations, replies, actions and task names try to be part of the page."""
    folder = tmp_path_factory.mktemp("runs") / "evil"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"algo": EVIL, "env": "made_up", "config": {"alpha_ep": 1.0}}))
    games = [(0, 10.0, [(EVIL, "go $first"), ("b", EVIL), (EVIL, "c")]), (0, 0.0, [(EVIL, "look"), ("d", EVIL), ("", "")])]
    logged(folder / "rows" / "000001.npz", games, ccpo_columns)
    return folder


def test_the_page_escapes_what_it_shows(evil, tmp_path):
    for traj in ("0", "1"):
        html = rendered(evil, tmp_path / "p.html", "--traj", traj)
        assert html.count("<script>") == 1 and "<img" not in html
        shown = [unescape(re.sub("<[^>]*>", "", x)) for x in re.findall('<div class="(?:observation|reply)">(.*?)</div>', html)]
        assert shown == {"0": [EVIL, "go $first", "b", EVIL, EVIL, "c"], "1": [EVIL, "look", "d", EVIL, "", "?"]}[traj]
    assert "invalid: no action" in rendered(evil, tmp_path / "p.html", "--traj", "1")


def test_the_page_asks_for_nothing_outside(run, tmp_path):
    html = rendered(run, tmp_path / "p.html")
    assert not re.search(r"https?:|//\w|@import|url\(|\bsrc=|<link", html)
    assert "default-src 'none'" in html
    assert set(re.findall(r'href="(.)', html)) == {"#"}


def test_the_page_shows_the_algorithms_numbers(run, tmp_path):
    html = rendered(run, tmp_path / "p.html", "--iteration", "2", "--traj", "5")
    rows = analyze.load_rows(run / "rows" / "000002.npz")
    mine = np.flatnonzero(rows["traj"] == 5)
    assert html.count('<article class="step"') == len(mine) == html.count("<template")
    for n in mine:
        card = html.split(f'<article class="step" id="step-{rows["step"][n] + 1}"')[1].split("</article>")[0]
        about = html.split(f'<template id="about-step-{rows["step"][n] + 1}"')[1].split("</template>")[0]
        for name in ("adv", "adv_history", "adv_future"):
            value = analyze.number(rows[name][n][0])
            assert value in card and f"<dt>{analyze.SYMBOLS[name]}<dd>{value}" in about
        assert "EP" not in card, "with alpha_ep 0 the episode's part is none of A"
        shares = slow_shares(rows, n, 1.0)
        row = r'<tr><td class="n">(\d+)<td class="n">(\d+)<td class="what">([^<]*)<td class="n">[^<]*<td .*?>([\d.]+) %'
        shown = re.findall(row, about)
        assert len(shown) == min(len(shares), analyze.PEERS_SHOWN)
        by_place = {(int(rows["traj"][v]), int(rows["step"][v]) + 1, rows["action"][v]): x for v, x in shares.items()}
        for traj, step, action, percent in shown:
            assert float(percent) == pytest.approx(100 * by_place[int(traj), int(step), action], abs=0.06)
        percents = [float(x[3]) for x in shown]
        assert percents == sorted(percents, reverse=True)
        assert ("none of them saw this" in about) == slow_peers(rows, n, True)[1]


def test_recomputed_credit_is_the_logged_one(run):
    rows = analyze.load_rows(run / "rows" / "000001.npz")
    again = analyze.recompute(rows, CONFIG)
    y = 0.95 ** (np.array([sum(rows["traj"] == t) for t in rows["traj"]]) - 1 - rows["step"]) * rows["outcome"]
    assert np.allclose(again["return_target"], y)
    for n in range(0, len(y), 40):
        shares = slow_shares(rows, n, 1.0)
        assert again["baseline"][n] == pytest.approx(sum(w * y[v] for v, w in shares.items()))


def test_many_peers_are_summed_up(tmp_path):
    run = run_folder(tmp_path / "run", iterations=())
    logged(run / "rows" / "000001.npz", [(0, 10.0 * (k % 2), [(HOME, f"go {k}")]) for k in range(30)], ccpo_columns)
    html = rendered(run, tmp_path / "p.html", "--traj", "3")
    assert "29 peers, with the same observation" in html and html.count('<td class="what">') == 20
    shown = sum(float(x) for x in re.findall(r">([\d.]+) %", html.split("and 9 more")[0]))
    assert shown + float(re.search(r"and 9 more, ([\d.]+) % together", html)[1]) == pytest.approx(100, abs=1.5)


def test_without_a_choice_the_page_is_a_success_among_failures_of_the_last_iteration(tmp_path, capsys):
    run = run_folder(tmp_path / "run", iterations=(3,))
    games = [(0, 10.0, [("a", "x")]), (0, 10.0, [("a", "x")]), (1, 0.0, [("a", "x")]), (1, 10.0, [("a", "x"), ("b", "y")])]
    logged(run / "rows" / "000007.npz", games, ccpo_columns)
    html = rendered(run, tmp_path / "p.html")
    assert "trajectory 3 of iteration 7" in capsys.readouterr().out
    assert "Trajectory 3: success after 2 steps" in html and "2: 0, 3: 10" in html
    logged(run / "rows" / "000008.npz", [(0, 0.0, [("a", "x")]), (1, 10.0, [("a", "x")])], ccpo_columns)
    rendered(run, tmp_path / "p.html")
    assert "trajectory 1 of iteration 8" in capsys.readouterr().out


def test_credit_per_token_colours_tokens(tmp_path):
    def columns(rows):
        tokens = [np.linspace(-1, 2, len(r.response_ids), dtype=np.float32) for r in rows]
        return credit_of(rows) | {"adv": tokens, "ret": tokens, "value": tokens}

    run = run_folder(tmp_path / "run", algo="capo_action", iterations=(1,), columns=columns)
    html = rendered(run, tmp_path / "p.html", "--traj", "0")
    assert "one per token" in html and "peers" not in html.split("</style>")[1]
    strengths = re.findall(r'<span class="(\w+)" style="--a:([\d.]+)" title="A [^"]*">', html.split('class="reply"')[1].split("</div>")[0])
    assert strengths[0] == ("neg", "0.500") and strengths[-1] == ("pos", "1.000")


def test_credit_that_is_zero_everywhere_has_no_colour(tmp_path):
    run = run_folder(tmp_path / "run", iterations=(1,), columns=lambda rows: credit_of(rows, adv=[0] * len(rows)))
    assert set(re.findall(r"--a:([\d.]+)", rendered(run, tmp_path / "p.html").split("</style>")[1])) == {"0.000"}


# ------------------------------------------------------------------------------------------------------------- browser


def browser_dump(page, fragment=""):
    """The page as a real browser has it after its scripts ran."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    assert browser, f"The page has to be seen in a real browser and there is none of {', '.join(names)}: apt-get install chromium."
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    command = [browser, *flags.split(), "--disable-sync", f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri() + fragment], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "</html>" in done.stdout, done.stderr
    return done.stdout


def panel_of(dom):
    return re.search(r'<aside[^>]*id="panel".*?</aside>', dom, re.DOTALL)[0]


def selected_of(dom):
    return re.findall(r'<article class="step selected" id="([\w-]+)"', dom)


def with_script(page, script):
    """The page with a script of the test's own at its end."""
    changed = page.with_name("changed.html")
    changed.write_text(page.read_text().replace("</html>", f"<script>{script}</script></html>"))
    return changed


@pytest.mark.slow
def test_a_browser_shows_the_page(run, tmp_path):
    page = tmp_path / "page.html"
    rendered(run, page, "--iteration", "2", "--traj", "5")
    rows = analyze.load_rows(run / "rows" / "000002.npz")
    mine = np.flatnonzero(rows["traj"] == 5)
    dom = browser_dump(page)
    strongest = rows["step"][max(mine, key=lambda n: abs(rows["adv"][n][0]))] + 1
    assert selected_of(dom) == [f"step-{strongest}"] and f"<h2>Step {strongest}</h2>" in panel_of(dom)
    for step in (1, len(mine)):
        dom = browser_dump(page, f"#step-{step}")
        assert selected_of(dom) == [f"step-{step}"] and f"<h2>Step {step}</h2>" in panel_of(dom) and "<table>" in panel_of(dom)
    assert len(selected_of(browser_dump(page, "#nonsense"))) == 1
    dom = browser_dump(with_script(page, "document.querySelector('#step-2 .observation').click()"), "#step-1")
    assert selected_of(dom) == ["step-2"] and "<h2>Step 2</h2>" in panel_of(dom)
    measure = """const box = e => e.getBoundingClientRect(), all = [...document.querySelectorAll('.step')];
        document.title = JSON.stringify({
            requests: performance.getEntriesByType('resource').length, wide: document.documentElement.scrollWidth > innerWidth,
            apart: all.every((e, k) => !k || box(e).top >= box(all[k - 1]).bottom) && box(all[0]).height > 40,
            colours: new Set([...document.querySelectorAll('.action b')].map(e => getComputedStyle(e).backgroundColor)).size })"""
    found = json.loads(re.search(r"<title>(.*?)</title>", browser_dump(with_script(page, measure)))[1])
    assert found == {"requests": 0, "wide": False, "apart": True, "colours": len({x[0].item() for n in mine for x in [rows["adv"][n]]})}


@pytest.mark.slow
def test_a_browser_runs_no_script_of_an_episode(evil, tmp_path):
    page = tmp_path / "page.html"
    for traj in ("0", "1"):
        rendered(evil, page, "--traj", traj)
        for step in (1, 2, 3):
            dom = browser_dump(page, f"#step-{step}")
            assert selected_of(dom) == [f"step-{step}"] and "<img" not in dom and "&lt;script&gt;" in dom


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.slow
@pytest.mark.parametrize("algo", ("ccpo_context", "capo_action"))
def test_training_writes_rows_for_all_of_this(algo, tmp_path):
    """--log_rows in train.py: the rows agree with the run's own metrics, and everything here reads them."""
    agent, out = tiny_agent(tmp_path / "agent"), tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / "train.py")]
    flags = ["--algo", algo, "--preset", "mini", "--env", "tests.example_env:GuessNumber", "--engine", "transformers", "--model", agent]
    flags += ["--tasks", "2", "--rollouts", "4", "--iterations", "2", "--eval_tasks", "2", "--log_rows", "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([*command, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [p.name for p in sorted((out / "rows").iterdir())] == ["000001.npz", "000002.npz"]
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["seconds/log_rows"] > 0
    rows = analyze.load_rows(out / "rows" / "000002.npz")
    assert len(rows["traj"]) == line["train/rows"] and len(set(rows["traj"].tolist())) == 8
    assert np.mean(rows["invalid"]) == pytest.approx(line["train/invalid"])
    assert analyze.play(rows)["revisits"] == pytest.approx(line["train/revisits"])
    assert ("hidden" in rows) == ("adv_history" in rows) == (algo == "ccpo_context")
    if algo == "ccpo_context":
        sizes = analyze.credit_sizes(rows)
        assert sizes["abs A_H"] == pytest.approx(line["credit/history"], abs=1e-5)
        assert sizes["abs A_EP"] == pytest.approx(line["credit/episode"], abs=1e-5)
    done = analysis(out)
    assert done.returncode == 0 and "## Over training" in done.stdout, done.stderr
    assert analysis(out, "--render", tmp_path / "page.html").returncode == 0
