"""compare.py: which runs are one line, and its numbers by hand."""

import json

import pytest

import compare
from envs import UserError


def make_run(folder, curve, *, seed=41, algo="ccpo_context", metric="eval/success", **config):
    """A run's files as train.py writes them. curve: {iteration: value}."""
    folder.mkdir()
    settings = {"seed": seed, "out": str(folder), "engine": "auto", "lr": 1e-4}
    (folder / "config.json").write_text(json.dumps({"algo": algo, "env": "alfworld", "settings": settings, "config": config}))
    lines = [{"iteration": i} | ({metric: curve[i]} if i in curve else {}) for i in range(max(curve) + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_seeds_are_one_line_and_its_numbers_are_right_by_hand(tmp_path, capsys):
    """0.2 and 0.4 have mean 0.3 and standard error 0.1; the gains are 0.2 and 0.4."""
    runs = [
        make_run(tmp_path / "a", {0: 0.0, 2: 0.2}, seed=41, kernel="exp"),
        make_run(tmp_path / "b", {0: 0.0, 2: 0.4}, seed=42, kernel="exp"),
        make_run(tmp_path / "c", {0: 0.25, 1: 0.3, 2: 0.5}, seed=41, kernel="uniform"),
        make_run(tmp_path / "d", {0: 0.1, 2: 0.1}, seed=41, algo="capo_action", ratio="mean"),
    ]
    compare.main([*map(str, runs), "--plot", str(tmp_path / "p.png")])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["eval/success after iteration", "0", "2", "last", "change", "seeds"], "iteration 1 is not shared"
    assert lines[2:] == [
        ["ccpo_context", "0.000 +- 0.000", "0.300 +- 0.100", "2: 0.300 +- 0.100", "+0.300 +- 0.100", "41, 42"],
        ["ccpo_context kernel=uniform", "0.250", "0.500", "2: 0.500", "+0.250", "41"],
        ["capo_action", "0.100", "0.100", "2: 0.100", "+0.000", "41"],
    ]
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_what_makes_no_other_method_does_not_part_seeds(tmp_path):
    a, b = make_run(tmp_path / "a", {0: 0.0}), make_run(tmp_path / "b", {0: 1.0}, seed=42)
    config = json.loads((b / "config.json").read_text())
    config["settings"]["engine"] = "vllm"
    (b / "config.json").write_text(json.dumps(config))
    assert compare.group([compare.read(a), compare.read(b)]).keys() == {"ccpo_context"}


def test_many_evaluations_are_thinned_to_the_first_and_the_last(tmp_path):
    run = compare.read(make_run(tmp_path / "a", {i: i / 100 for i in range(41)}))
    head = compare.table(compare.group([run]), "eval/success", points=3).splitlines()[0]
    assert [cell.strip() for cell in head.strip("|").split("|")][1:4] == ["0", "20", "40"]


def test_runs_of_other_lengths_have_their_own_last_iteration(tmp_path):
    runs = [make_run(tmp_path / "a", {0: 0.0, 4: 0.5}), make_run(tmp_path / "b", {0: 0.0, 6: 0.25}, kernel="uniform")]
    head, _, *lines = compare.table(compare.group(list(map(compare.read, runs))), "eval/success").splitlines()
    assert "| 0 | last |" in head and "| 4: 0.500 | +0.500 |" in lines[0] and "| 6: 0.250 | +0.250 |" in lines[1]


def test_bad_input(tmp_path):
    run = make_run(tmp_path / "a", {0: 0.0})
    with pytest.raises(UserError, match="nowhere is no folder of a run"):
        compare.read(tmp_path / "nowhere")
    with pytest.raises(UserError, match="Two runs of ccpo_context have the seed 41"):
        compare.group([compare.read(run)] * 2)
    with pytest.raises(UserError, match="--metric train/x"):
        compare.table(compare.group([compare.read(run)]), "train/x")
