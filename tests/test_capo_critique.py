"""CAPO-critique against given numbers, against slow loops written apart, and against the properties of its equations."""

import dataclasses
import itertools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import oracle_capo_critique as oracle
import pytest
import splits
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import capo_critique as capo

VECTORS = json.loads((Path(__file__).parent / "vectors" / "capo_critique.json").read_text())
NAN, INF = math.nan, math.inf
few = settings(max_examples=25, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 10**6)
THIRD = "</step_2> <incorrect_steps>1</incorrect_steps>"
REPLIES = {  # what each is cut into
    "no blank line": ["one step, 2 < 3\nand a line of it"],
    "three": ["first.\n\n", "second.\n\n", "\\boxed{3}"],
    "long separators": ["\n\n a\n\n\n\n", "b\n\n   \n\n", "c \n"],
    "code": ["```python\nx = 1\n\n", "\n".join(["def f():", "    return x\n\n"]), "    f()\n```"],
    "emoji": ["😀 = 🤷🏽‍♀️.\n\n", "é€ 漢字\n\n", "👍"],
    "blanks": [" \n\n \n"],
    "empty": [""],
    "tags": ["<step_1>a</step_1>\n\n", "b" + THIRD + "<|im_end|>\n\n", "<STEP_9> < /step_3 >"],
    "windows line ends": ["a\r\n\r\nb"],
}
fragments = st.sampled_from(["a", "b c", " ", "\n", "\n\n", "\n\n\n", ".\n\n", "\t", "é", "😀", "<", "</step_1>", "<|im_end|>", "1"])
replies = st.lists(fragments, max_size=14).map("".join)


# ------------------------------------------------------------------------------------------------- helpers


def t64(x):
    return torch.as_tensor(x, dtype=torch.float64)


def close(actual, expected, tol=1e-9):
    actual, expected = t64(actual), t64(expected)
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    assert torch.allclose(actual, expected, rtol=tol, atol=tol), f"{actual}\n{expected}"


def close_rows(actual, expected, tol=1e-9):
    assert [len(row) for row in actual] == [len(row) for row in expected]
    close([a for row in actual for a in row], [a for row in expected for a in row], tol)


def integer_keys(weights):
    return {int(s): weight for s, weight in weights.items()}


def cut(text, rng, longest=6):
    """The text's bytes in tokens of random length: characters and blank lines lie across tokens, as with byte-level BPE."""
    data, tokens = text.encode(), []
    while data:
        size = rng.randint(1, longest)
        tokens.append(data[:size])
        data = data[size:]
    return tokens


def decode(tokens):
    return b"".join(tokens).decode(errors="replace")


def random_reply(rng, most=5):
    words = ("so", "x < 3", "é", "😀", "\\frac{1}{2}", "=\n", "</step_2>", ".", "  ")
    pieces = ["".join(rng.choice(words) for _ in range(rng.randint(0, 4))) for _ in range(rng.randint(0, most))]
    box = rng.choice(["\\boxed{3}", "\\boxed{3}", "\\boxed{\\frac{1}{2}}", "\\boxed{}", "\\boxed{1", "3"])
    return "".join(piece + "\n" * rng.randint(1, 4) for piece in pieces) + box


def random_list(rng):
    """What a judge may put between the tags: mostly readable."""
    items = [
        rng.choice(["{}", "{}", "step {}", "Step_{}", "STEP\n{}", "+{}", "0{}"]).format(rng.randint(0, 7)) for _ in range(rng.randint(0, 4))
    ]
    odd = rng.choice([""] * 12 + ["none", "n/a", "[]", "1-3", "-2", "step", "step3", "[1]", ".", "two", "1.", "step, 2", "²", "9" * 30])
    glue = rng.choice([", ", ",", " ", "\n", " ,, "])
    return rng.choice(["", " ", "\n"]) + glue.join(items + [odd] * (odd != "")) + rng.choice(["", "", ".", " ", ".\n", ","])


def critique(listed, rng=None):
    tag = (rng or random).choice(["incorrect_steps", "Incorrect_Steps"]) if rng else "incorrect_steps"
    return f"Judgment: Is the solution correct? No\n<{tag}>{listed}</{tag}>"


def random_critique(rng):
    text = critique(random_list(rng), rng)
    if rng.random() < 0.3:
        extra = ["<incorrect_steps>", "</incorrect_steps>", "no tag", critique("2"), "<incorrect_steps>1"]
        text = rng.choice([rng.choice(extra) + text, text + rng.choice(extra), rng.choice(extra)])
    return text


def random_votes(rng, most=6):
    return [{s for s in range(1, 6) if rng.random() < 0.5} for _ in range(rng.randint(1, most))]


def random_group(rng, empty=True):
    """Rollouts of some prompts: (steps of the tokens, weights, correct, group)."""
    rows = []
    for _ in range(rng.randint(1, 7)):
        steps = sorted(rng.randint(1, 4) for _ in range(rng.randint(0 if empty else 1, 9)))
        weights = {s: rng.choice([1.0, 1.0, 0.5, 0.25]) for s in range(1, 5) if rng.random() < 0.4}
        rows.append((steps, weights, rng.randint(0, 1), rng.choice([90, 7, 3])))
    return rows


# ------------------------------------------------------------------------------------------------- given numbers


@pytest.mark.parametrize("case", VECTORS["split"])
def test_vectors_split(case):
    assert capo.split_steps(case["text"]) == [tuple(span) for span in case["spans"]]


@pytest.mark.parametrize("case", VECTORS["parse"])
def test_vectors_parse(case):
    assert capo.parse_critique(case["text"], case["n"]) == (None if case["steps"] is None else set(case["steps"]))


@pytest.mark.parametrize("case", VECTORS["vote"])
def test_vectors_vote(case):
    assert set(case) == {"critiques", *capo.VOTES}
    for rule in capo.VOTES:
        weights = capo.vote(case["critiques"], rule)
        expected = integer_keys(case[rule])
        assert weights.keys() == expected.keys()
        close([weights[s] for s in expected], list(expected.values()))


@pytest.mark.parametrize("case", VECTORS["advantage"])
def test_vectors_advantage(case):
    rollouts = zip(case["correct"], case["step_of_token"], map(integer_keys, case["step_weight"]))
    rewards = [capo.token_rewards(*rollout, C=case["C"], P=case["P"]) for rollout in rollouts]
    close_rows(rewards, case["rewards"])
    close_rows(capo.group_advantages(rewards, [4] * len(rewards)), case["advantages"])


# ------------------------------------------------------------------------------------------------- the slow loops


@pytest.mark.parametrize("block", range(4))
def test_oracle_steps(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        text = random_reply(rng)
        tokens = cut(text, rng)
        spans, offsets = capo.split_steps(text), capo.token_offsets(tokens, decode)
        assert spans == oracle.split_steps(text)
        starts = oracle.token_starts(tokens)
        assert [start for start, _ in offsets] == starts
        steps = capo.token_steps([*offsets, (len(text), len(text))], spans)
        assert steps == oracle.token_steps(starts, spans, n_eos=1)
        assert capo.well_formed(text, True) == oracle.well_formed(text, True)


@pytest.mark.parametrize("block", range(4))
def test_oracle_critiques(block):
    readable = 0
    for seed in range(500 * block, 500 * block + 500):
        rng = random.Random(seed)
        text, n = random_critique(rng), rng.randint(1, 6)
        steps, expected = capo.parse_critique(text, n), oracle.parse_critique(text, n)
        assert steps == (None if expected is None else set(expected)), text
        readable += steps is not None
        critiques = random_votes(rng)
        for rule in capo.VOTES:
            assert capo.vote(critiques, rule) == pytest.approx(oracle.vote(critiques, rule), abs=1e-12)
    assert 150 < readable < 450


@pytest.mark.parametrize("block", range(4))
def test_oracle_credit(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        rows = random_group(rng)
        C, P = rng.choice([(2.0, 1.0), (2.0, 0.0), (1.0, 0.3), (2.0, 0.1)])
        good, bonus = [rng.random() < 0.7 for _ in rows], rng.choice([0.2, 0.0])
        rewards = [
            capo.token_rewards(correct and g, steps, weights, C=C, P=P, format_reward=bonus * g)
            for (steps, weights, correct, _), g in zip(rows, good)
        ]
        expected = [oracle.token_rewards(steps, weights, correct, g, C, P, bonus) for (steps, weights, correct, _), g in zip(rows, good)]
        close_rows(rewards, expected)
        groups = [row[3] for row in rows]
        close_rows(capo.group_advantages(rewards, groups), oracle.advantages(expected, groups))


@pytest.mark.parametrize("block", range(4))
def test_oracle_loss(block):
    for seed in range(50 * block, 50 * block + 50):
        rng = random.Random(seed)
        rows, scale = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))], rng.choice([0.05, 0.5, 3.0, 30.0])
        logp, old, ref, adv = ([[rng.gauss(-1, scale) for _ in range(n)] for n in rows] for _ in range(4))
        eps, kl_coef = rng.choice([0.2, 0.1]), rng.choice([0.01, 0.5])
        expected = oracle.loss(logp, old, ref, adv, eps=eps, kl_coef=kl_coef)
        mask = torch.arange(max(rows)) < torch.tensor(rows)[:, None]

        def cells(x, mask=mask):
            out = torch.full(mask.shape, NAN, dtype=torch.float64)
            out[mask] = t64([v for row in x for v in row])
            return out

        out = {"logp": cells(logp), "entropy": cells(old)}
        batch = dict(mask=mask, logp_old=cells(old), logp_ref=cells(ref), adv=cells(adv))
        total, (grad,), _ = run_loss(out, batch, capo.Config(eps=eps, kl_coef=kl_coef), [slice(None)])
        close(total, expected["total"])
        close(grad[mask], [g for row in expected["grad"] for g in row])


# ------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("name", REPLIES)
def test_replies_are_cut_where_expected(name):
    text = "".join(REPLIES[name])
    assert [text[a:b] for a, b in capo.split_steps(text)] == REPLIES[name]


@few
@given(replies)
def test_steps_tile_the_reply(text):
    spans = capo.split_steps(text)
    assert "".join(text[a:b] for a, b in spans) == text and spans[0][0] == 0 and spans[-1][1] == len(text)
    assert all(a < b for a, b in spans) or text == ""
    assert len(spans) == max(1, sum(bool(piece.strip()) for piece in re.split(r"\n\n+", text)))
    for a, b in spans[: len(spans) if text.strip() else 0]:  # a step holds something, and a blank line at its ends alone
        assert text[a:b].strip() and not re.search(r"\S\s*\n\n+\s*\S", text[a:b])


@few
@given(replies, seeds)
def test_a_token_is_in_the_step_of_its_first_character(text, seed):
    tokens = cut(text, random.Random(seed))
    spans, offsets = capo.split_steps(text), capo.token_offsets(tokens, decode)
    steps = capo.token_steps([*offsets, (len(text), len(text))], spans)
    assert steps[-1] == len(spans) and steps == sorted(steps) and len(steps) == len(tokens) + 1
    for (start, end), s in zip(offsets, steps):
        assert spans[s - 1][0] <= start < spans[s - 1][1] and start <= end
    assert [end for _, end in offsets[:-1]] == [start for start, _ in offsets[1:]]


def test_tokens_across_a_blank_line_by_hand():
    """One token ".\\n\\n" ends its step; one that brings the next step's first letter along stays with the step it starts in."""
    tokens = [b"one", b".\n\n", b"two", b".\n\nthr", b"ee"]
    offsets = capo.token_offsets(tokens, decode)
    assert offsets == [(0, 3), (3, 6), (6, 9), (9, 15), (15, 17)]
    assert capo.token_steps([*offsets, (17, 17)], capo.split_steps(decode(tokens))) == [1, 1, 2, 2, 3, 3]


def test_a_blank_line_in_two_tokens():
    tokens = [b"a\n", b"\n", b"b\n", b"\n\n", b"c"]
    assert capo.token_steps(capo.token_offsets(tokens, decode), capo.split_steps(decode(tokens))) == [1, 1, 2, 2, 3]


def test_an_emoji_in_four_tokens_is_in_the_step_it_begins():
    face = "😀".encode()
    tokens = [b"a\n\n", *(face[i : i + 1] for i in range(4)), b"\n\n", face[:2], face[2:] + b"b"]
    offsets = capo.token_offsets(tokens, decode)
    assert [start for start, _ in offsets] == [0, 3, 3, 3, 3, 4, 6, 6] and offsets[-1][1] == 8
    assert capo.token_steps(offsets, capo.split_steps(decode(tokens))) == [1, 2, 2, 2, 2, 2, 3, 3]


def test_a_reply_that_is_cut_inside_a_character():
    tokens = [b"ab\n\n", "😀".encode()[:2]]
    assert capo.token_offsets(tokens, decode) == [(0, 4), (4, 5)]  # the text ends with a replacement character


def test_a_replacement_character_that_the_model_wrote():
    """It looks whole before it is: the rest of it counts to the character after, which is in the same step."""
    tokens = ["�".encode()[:1], "�".encode()[1:] + b"\n\n", b"a", b"\xff", b"b"]
    offsets = capo.token_offsets(tokens, decode)
    assert [start for start, _ in offsets] == [0, 1, 3, 4, 5]
    assert capo.token_steps(offsets, capo.split_steps(decode(tokens))) == [1, 1, 2, 2, 2]


def test_decoders_that_drop_the_first_space():
    words = [" a", " b.\n\n", " c", "d"] * 20

    def strip(tokens):
        return "".join(tokens).removeprefix(" ")

    text, offsets = strip(words), capo.token_offsets(words, strip)
    assert [text[a:b] for a, b in offsets] == ["a", *words[1:]]
    assert max(capo.token_steps(offsets, capo.split_steps(text))) == 21


def test_offsets_of_a_real_tokenizer():
    """Byte-level BPE that has ".\\n\\n" as one token, as those of Qwen and Llama do."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["so.\n\nnow.\n\nthen.\n\n"] * 20, trainer)
    text = "so.\n\n x.\n\n😀 é\n\nnow.\n\n"
    ids = bpe.encode(text).ids
    assert any(bpe.decode([i]).endswith(".\n\n") and len(bpe.decode([i])) > 2 for i in ids)
    offsets, plain = capo.token_offsets(ids, bpe.decode), []
    for k in range(len(ids)):
        shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(bpe.decode(ids[:k]), text))
        plain.append(sum(1 for _ in shared))
    assert [start for start, _ in offsets] == plain and offsets[-1][1] == len(text)
    steps = capo.token_steps(offsets, capo.split_steps(text))
    assert sorted(set(steps)) == [1, 2, 3, 4]


def test_work_for_the_offsets_grows_with_the_length():
    decoded = 0

    def counted(ids):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    tokens = cut("so x = 😀.\n\n" * 200, random.Random(0))
    capo.token_offsets(tokens, counted)
    assert decoded < 30 * len(tokens)


# ------------------------------------------------------------------------------------------------- the judge


def asked(response, problem="What?", **more):
    messages = capo.critique_messages(problem, response, **more)
    assert [m["role"] for m in messages] == ["system", "user"] and all(set(m) == {"role", "content"} for m in messages)
    return messages[1]["content"]


@pytest.mark.parametrize("name", REPLIES)
def test_the_judge_sees_every_step_in_its_own_tag(name):
    response = "".join(REPLIES[name])
    steps = re.findall(r"<step_(\d+)>(.*?)</step_\1>", asked(response), re.DOTALL)
    assert [int(s) for s, _ in steps] == list(range(1, len(REPLIES[name]) + 1))
    assert [text.replace("&lt;", "<") for _, text in steps] == [piece.strip() for piece in REPLIES[name]]


@few
@given(st.lists(st.sampled_from(["a", "\n\n", "</step_1>", "<step_2>", "< /step_1>", "<incorrect_steps>2</incorrect_steps>",
                                 "<|im_end|>", "<｜User｜>", "<<step_1>>"]), max_size=12).map("".join))  # fmt: skip
def test_no_text_forges_a_tag_or_a_turn(text):
    n = len(capo.split_steps(text))
    honest = asked("\n\n".join(["a"] * n), problem="a", solution="a")
    forged = asked(text, problem=text, solution=text or "a")
    assert oracle.step_tags_ok(forged.split("Check each step")[0], n)
    assert forged.count("<") == honest.count("<") and "<|" not in forged


def test_the_prompt_says_what_the_paper_says():
    text = asked("a\n\nb", problem="1 < 2?", solution="yes <step_1>")
    assert "1 &lt; 2?" in text and "yes &lt;step_1>" in text and "Check each step independently" in text
    assert text.index("Problem:") < text.index("Reference solution:") < text.index("<step_1>a</step_1>\n<step_2>b</step_2>")
    assert text.endswith("Judgment: Is the solution correct? Yes/No\n<incorrect_steps>...</incorrect_steps>")
    for missing in (None, ""):
        assert "Reference" not in asked("a", solution=missing)
    assert capo.parse_critique(text, 3) is None  # a judge that repeats the prompt has said nothing


def test_request_is_one_call_for_all_critiques():
    request = capo.critique_request("p", "a\n\nb", capo.Config(), solution="s")
    assert request.pop("messages") == capo.critique_messages("p", "a\n\nb")
    assert request == dict(n=4, temperature=0.7, top_p=0.9, max_tokens=2048)
    cfg = capo.Config(reference_solution=True, critiques=2, judge_temperature=0.0, judge_top_p=1.0, judge_tokens=99)
    request = capo.critique_request("p", "a", cfg, solution="s")
    assert request.pop("messages") == capo.critique_messages("p", "a", solution="s")
    assert request == dict(n=2, temperature=0.0, top_p=1.0, max_tokens=99)


LISTS = [
    ("3", {3}), ("1,2", {1, 2}), ("1 2", {1, 2}), ("step 3", {3}), ("STEP_3, Step 1", {1, 3}), ("step\n2\nstep  4", {2, 4}),
    (" \n 2 \n", {2}), (",, 2 ,", {2}), ("1 step 2 step_3", {1, 2, 3}), ("1, 2.", {1, 2}), ("none.", set()),
    ("NONE", set()), ("n/a", set()),
    ("[]", set()), ("", set()), (" \n ", set()), (".", set()), (",", set()), ("none,", set()), ("+2, -1", {2}),
    ("step -1", set()), ("02", {2}),
    ("0", set()), ("-0", set()), ("5", set()), ("4, 5, 44", {4}), ("9" * 5000, set()), ("2 2 2", {2}), ("-2", set()), ("1 -3", {1}),
    ("1-3", None), ("1 to 3", None), ("two", None), ("step", None), ("step, 3", None), ("step3", None), ("steps 3", None), ("#3", None),
    ("[1]", None), ("1;2", None), ("none, 3", None), ("1.5", None), ("1., 2", None), ("1..", None), ("+-2", None),
    ("²", None), ("３", None),
    ("1</step_1>", None), ("1\\n", None), ("step_step 3", None), ("step step 3", None), ("- 2", None), ("2e0", None), ("1_0", None),
]  # fmt: skip


@pytest.mark.parametrize("listed,steps", LISTS)
def test_lists_of_wrong_steps(listed, steps):
    assert capo.parse_critique(critique(listed), 4) == steps


@pytest.mark.parametrize(
    "text,steps",
    [
        (None, None), ("", None), ("<incorrect_steps>", None), ("</incorrect_steps>", None), ("</incorrect_steps>1<incorrect_steps>", None),
        ("<incorrect_steps>1<incorrect_steps>2</incorrect_steps>", {2}), ("<incorrect_steps>1</incorrect_steps></incorrect_steps>", {1}),
        ("<incorrect_steps>1</incorrect_steps><incorrect_steps>2", {1}), ("<incorrect_steps>1</incorrect_steps> 2 <INCORRECT_steps>3", {1}),
        ("<incorrect_steps>1</incorrect_steps><incorrect_steps>x</incorrect_steps>", None), ("<incorrect_steps>1<incorrect_steps>", None),
        ("<incorrect_steps>1</incorrect_steps><incorrect_steps></incorrect_steps>", set()), ("incorrect_steps: 2", None),
        ("< incorrect_steps>1</incorrect_steps>", None), ("&lt;incorrect_steps>1</incorrect_steps>", None),
        ("<incorreCt_ſteps>1</incorrect_steps>", None),
        ("<step_2>quoted</step_2> is wrong\n<incorrect_steps>2</incorrect_steps>\nDone.", {2}),
    ],
)  # fmt: skip
def test_tags_of_a_critique(text, steps):
    assert capo.parse_critique(text, 3) == steps


@few
@given(
    st.lists(st.sampled_from([*"123,. -\n", "step", "_", "none", "[]", "<incorrect_steps>", "</incorrect_steps>"])).map("".join),
    st.integers(1, 4),
)
def test_any_text_is_read_or_refused(text, n):
    steps = capo.parse_critique(text, n)
    expected = oracle.parse_critique(text, n)
    assert steps == (None if expected is None else set(expected)) and (steps or set()) <= set(range(1, n + 1))


# ------------------------------------------------------------------------------------------------- votes


def test_votes_by_hand():
    critiques = [{2, 3}, {2, 4}, {2, 3, 4}, {1, 2, 4}]  # counts 1, 4, 2, 3
    wrong = {"intersection": {2}, "majority": {2, 3, 4}, "majority_strict": {2, 4}, "union": {1, 2, 3, 4}, "greedy": {2, 3}}
    for rule, steps in wrong.items():
        assert capo.vote(critiques, rule) == dict.fromkeys(steps, 1.0)
    assert capo.vote(critiques, "average") == {1: 0.25, 2: 1.0, 3: 0.5, 4: 0.75}
    assert all(capo.vote([], rule) == {} for rule in capo.VOTES)


@few
@given(seeds)
def test_votes_lie_within_each_other(seed):
    critiques = random_votes(random.Random(seed))
    wrong = {rule: set(capo.vote(critiques, rule)) for rule in capo.VOTES}
    assert wrong["intersection"] <= wrong["majority_strict"] <= wrong["majority"] <= wrong["union"] == wrong["average"]
    assert wrong["intersection"] <= wrong["greedy"] <= wrong["union"]
    average = capo.vote(critiques, "average")
    assert all(0 < weight <= 1 for weight in average.values())
    assert {s for s, weight in average.items() if weight == 1} == wrong["intersection"]


@few
@given(seeds)
def test_order_of_critiques_is_irrelevant_and_one_critique_decides_every_vote(seed):
    rng = random.Random(seed)
    critiques = random_votes(rng)
    for rule in set(capo.VOTES) - {"greedy"}:
        assert capo.vote(rng.sample(critiques, len(critiques)), rule) == capo.vote(critiques, rule)
    for rule in capo.VOTES:
        assert capo.vote(critiques[:1], rule) == dict.fromkeys(critiques[0], 1.0)
    assert capo.vote(critiques, "greedy") == dict.fromkeys(critiques[0], 1.0)


def test_failed_critiques_are_left_out_of_k():
    texts = [critique("1"), None, "nothing to read", critique("1, 2")]
    assert capo.step_weights(texts, 3, "intersection") == ({1: 1.0}, 0.5)
    assert capo.step_weights(texts, 3, "average") == ({1: 1.0, 2: 0.5}, 0.5)
    assert capo.step_weights([None, critique("2"), critique("3")], 3, "greedy") == ({2: 1.0}, pytest.approx(1 / 3))
    for nothing in ([None, None, "x"], [None], []):
        for rule in capo.VOTES:
            assert capo.step_weights(nothing, 3, rule) == ({}, 1.0)
    assert capo.step_weights([critique("none")] * 4, 3, "union") == ({}, 0.0)  # read, and no step is wrong


# ------------------------------------------------------------------------------------------------- credit


def test_rewards_by_hand():
    assert capo.token_rewards(1, [1, 1, 2, 3], {2: 1.0, 3: 0.5}) == [2.0, 2.0, 1.0, 1.5]
    assert capo.token_rewards(False, [1, 2], {2: 1.0}, C=4.0, P=3.0, format_reward=0.25) == [0.25, -2.75]
    assert capo.token_rewards(1, [], {1: 1.0}) == []


def test_outcome_outweighs_a_wrong_step():
    def order(**weights):
        return [capo.token_rewards(correct, [1], {1: 1.0} if wrong else {}, **weights)[0] for correct in (1, 0) for wrong in (0, 1)]

    assert order() == [2.0, 1.0, 0.0, -1.0]
    assert order(C=2.0, P=2.0) == [2.0, 0.0, 0.0, -2.0]  # C = P: a right answer with a wrong step is worth a clean wrong one
    assert order(C=2.0, P=5.0) == [2.0, -3.0, 0.0, -5.0]


def test_advantages_by_hand():
    """Rewards 2, 1, 0, 1 have mean 1 and sample deviation sqrt(2/3), however they lie over rollouts."""
    expected = [1 / (math.sqrt(2 / 3) + 1e-6), 0.0, -1 / (math.sqrt(2 / 3) + 1e-6), 0.0]
    for sizes in ((4,), (1, 3), (2, 0, 2)):
        values = iter([2.0, 1.0, 0.0, 1.0])
        rewards = [[next(values) for _ in range(n)] for n in sizes]
        adv = capo.group_advantages(rewards, [5] * len(sizes))
        close([a for row in adv for a in row], expected)
    small = [[1e-8, 3e-8]]  # small, and still no tie: 1e-6 is added to the deviation
    close_rows(capo.group_advantages(small, [0]), [[-1e-8 / (math.sqrt(2) * 1e-8 + 1e-6), 1e-8 / (math.sqrt(2) * 1e-8 + 1e-6)]])


@few
@given(seeds)
def test_advantages_of_a_group_sum_to_zero_and_groups_stay_apart(seed):
    rng = random.Random(seed)
    rows = random_group(rng)
    rewards, groups = [capo.token_rewards(c, steps, weights) for steps, weights, c, _ in rows], [row[3] for row in rows]
    adv = capo.group_advantages(rewards, groups)
    for g in set(groups):
        mine = [n for n, other in enumerate(groups) if other == g]
        assert abs(sum(a for n in mine for a in adv[n])) < 1e-9
        close_rows([adv[n] for n in mine], capo.group_advantages([rewards[n] for n in mine], [g] * len(mine)), 1e-12)
    order = rng.sample(range(len(rows)), len(rows))
    shuffled = capo.group_advantages([rewards[n] for n in order], [groups[n] for n in order])
    close_rows(shuffled, [adv[n] for n in order], 1e-12)


@few
@given(seeds)
def test_clean_tokens_of_a_rollout_beat_its_flagged_ones(seed):
    rows = random_group(random.Random(seed), empty=False)
    rewards = [capo.token_rewards(c, steps, weights) for steps, weights, c, _ in rows]
    for (steps, weights, _, _), adv in zip(rows, capo.group_advantages(rewards, [row[3] for row in rows])):
        clean = [a for s, a in zip(steps, adv) if s not in weights]
        flagged = [a for s, a in zip(steps, adv) if s in weights]
        assert not clean or not flagged or min(clean) > max(flagged)


@few
@given(st.lists(st.booleans(), min_size=2, max_size=8).filter(lambda x: any(x) and not all(x)), st.integers(1, 12))
def test_without_penalty_and_at_equal_length_it_is_grpo(correct, length):
    """GRPO's advantage of whole replies, times the root of (n L - 1) / (L (n - 1)): pooling tokens has other degrees of freedom."""
    n = len(correct)
    adv = capo.group_advantages([capo.token_rewards(c, [1] * length, {1: 1.0}, P=0.0) for c in correct], [0] * n)
    x = np.array(correct) * 2.0
    grpo = (x - x.mean()) / (x.std(ddof=1) + 1e-6) * math.sqrt((n * length - 1) / (length * (n - 1)))
    close_rows(adv, np.repeat(grpo[:, None], length, 1).tolist(), 1e-5)


@pytest.mark.parametrize(
    "rewards", [[[0.35] * 3, [0.35] * 4], [[0.1 + 0.2], [0.3, 0.3]], [[4.2]], [[]], [[], []], [[1e6 + 1e-7], [1e6]], [[-5e-13, 4e-13]]]
)
def test_equal_rewards_give_exactly_zero(rewards):
    adv = capo.group_advantages(rewards, [1] * len(rewards))
    assert adv == [[0.0] * len(row) for row in rewards]


@pytest.mark.parametrize("x", [[1.0, 1.0 + 3e-12], [0.0, 2e-12], [1e6, 1e6 + 1e-5]])
def test_barely_different_is_no_tie(x):
    assert capo.group_advantages([x], [0])[0][1] > 0


@pytest.mark.parametrize(
    "text,good",
    [
        ("so \\boxed{3}", True), ("\\boxed{\\frac{1}{2}} it is", True), ("\\boxed{}", False), ("\\boxed{ \n}", False),
        ("3", False), ("", False),
        ("\\boxed{1} \\boxed{2", False), ("\\boxed{1} \\boxed{}", False), ("\\boxed{} \\boxed{1}", True),
        ("\\boxed{\\{}", True), ("\\boxed{\\}", False),
        ("\\boxed{\\boxed{3}}", True), ("\\boxed 3", False), ("boxed{3}", False), ("3}", False), ("\\boxed{{}", False),
        ("\\boxed{{1}\n}", True),
        ("\\boxed{1\\\\}", True), ("}\\boxed{", False),
    ],
)  # fmt: skip
def test_well_formed_answers(text, good):
    assert capo.well_formed(text, True) is good and oracle.well_formed(text, True) is good
    assert capo.well_formed(text, False) is False


# ------------------------------------------------------------------------------------------------- loss


def test_clip_by_hand():
    z = torch.tensor([math.log(0.5), math.log(1.5), 0.0] * 2, dtype=torch.float64, requires_grad=True)
    loss = capo.clip_loss(z, t64([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]))
    close(loss.detach(), [-0.5, -1.2, -1.0, 0.8, 1.5, 1.0])  # 0.2 is the default
    loss.sum().backward()
    close(z.grad, [-0.5, 0.0, -1.0, 0.0, 1.5, 1.0])
    close(capo.clip_loss(z.detach(), torch.ones(6, dtype=torch.float64), eps=0.1)[1], -1.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_stay_finite(dtype):
    x = t64([100.0, -100.0]).to(dtype).requires_grad_()
    for a in (1.0, -1.0):
        loss = capo.clip_loss(x, torch.full((2,), a, dtype=dtype))
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()
    assert float(loss[0].detach()) == pytest.approx(math.exp(20), rel=1e-5)
    penalty = capo.kl_penalty(x, torch.zeros(2, dtype=dtype))
    penalty.sum().backward()
    assert penalty.tolist() == [10.0, 10.0] and torch.isfinite(x.grad).all()


@few
@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=8))
def test_kl_by_its_formula(pairs):
    logp, ref = t64([p[0] for p in pairs]), t64([p[1] for p in pairs])
    close(capo.kl_penalty(logp, ref), [oracle.kl_term(*pair)[0] for pair in pairs])
    assert (capo.kl_penalty(logp, ref) >= 0).all() and (capo.kl_penalty(logp, logp) == 0).all()


def minibatch(n, seed=0):
    """A mini-batch of n rows, the third without any token; masked cells hold NaN."""
    rng, cells, out, batch = splits.token_columns(n, seed)
    mask = batch["mask"]
    batch |= dict(adv=cells(0, 1), flagged=cells(0.5, 0.1))
    batch["adv"][1] = torch.where(mask[1], 0.0, NAN)  # a rollout of a tied group
    batch["well_formed"] = t64([[float(rng.random() < 0.5)] for _ in range(n)])
    batch["critique_failed"] = t64([[1.0 if i < 2 else rng.choice([0.0, 0.25])] for i in range(n)])
    return out, batch


def run_loss(out, batch, cfg, chunks):
    return splits.run_loss(capo, out, batch, cfg, chunks, wrt=("logp",))


@pytest.mark.parametrize("n", [7, 9])
def test_loss_does_not_depend_on_the_split(n):
    splits.check_splits(capo, *minibatch(n, seed=n), capo.Config(kl_coef=0.1), wrt=("logp",))


@pytest.mark.parametrize("fill", [NAN, INF, -INF, 1e30])
def test_masked_cells_never_matter(fill):
    out, batch = minibatch(7, seed=1)
    clean, _, _ = run_loss(out, batch, capo.Config(), [slice(None)])
    mask = batch["mask"]
    dirty = {k: torch.where(mask, v, fill) for k, v in (out | batch).items() if v.shape == mask.shape and k != "mask"}
    dirty_batch = {k: dirty.get(k, v) for k, v in batch.items()}
    total, (grad,), _ = run_loss({k: dirty[k] for k in out}, dirty_batch, capo.Config(), [slice(None)])
    assert float(total) == float(clean) and torch.isfinite(grad).all() and (grad[~mask] == 0).all()


def test_mean_of_means_is_not_taken():
    """10 tokens of loss 1 and 2 tokens of loss 7: 2.0, not 4.0."""
    mask = torch.arange(10) < torch.tensor([[10], [2]])
    logp = torch.where(mask, t64(-1.0), NAN)
    batch = dict(logp_old=logp, mask=mask, adv=t64([[-1.0] * 10, [-7.0] * 10]))  # and kl_coef=0 needs no reference
    for chunks in ([slice(None)], [slice(0, 1), slice(1, 2)]):
        close(run_loss(dict(logp=logp, entropy=logp), batch, capo.Config(kl_coef=0.0), chunks)[0], 2.0)


def test_a_minibatch_without_any_token_has_loss_zero():
    out, batch = minibatch(3)
    batch["mask"] = torch.zeros_like(batch["mask"])
    total, (grad,), _ = run_loss(out, batch, capo.Config(), [slice(None)])
    assert float(total) == 0.0 and (grad == 0).all()


def test_denominators_count_tokens():
    _, batch = minibatch(6)
    tokens = int(batch["mask"].sum())
    assert {k: int(v) for k, v in capo.denominators(batch, capo.Config()).items()} == dict(policy=tokens, kl=tokens)


def test_metrics_say_what_happened():
    out, batch = minibatch(9, seed=3)
    mask = batch["mask"]
    z, adv = (out["logp"] - batch["logp_old"])[mask].tolist(), batch["adv"][mask].tolist()
    _, _, (names,) = run_loss(out, batch, capo.Config(), [slice(None)])
    mean = {k: float(a) / float(b) for k, (a, b) in names.items() if b is not None}
    w = [math.exp(x) for x in z]
    close(mean["policy/ratio"], sum(w) / len(w))
    close(float(names["policy/ratio/max"][0]), max(w))
    terms = [oracle.policy_term(x, 0.0, a) for x, a in zip(z, adv)]
    close(mean["policy/loss"], sum(term for term, _, _ in terms) / len(w))
    assert int(names["policy/clip_frac"][0]) == sum(acts for _, _, acts in terms) > 0
    close(mean["policy/entropy"], float(out["entropy"][mask].mean()))
    close(mean["policy/kl"], float(capo.kl_penalty(out["logp"], batch["logp_ref"])[mask].mean()))
    real = mask.any(1)
    close(mean["credit/tied"], 1 / 8)
    close(mean["credit/flagged"], float(batch["flagged"][mask].mean()))
    close(mean["credit/well_formed"], float(batch["well_formed"][real].mean()))
    close(mean["judge/failed"], float(batch["critique_failed"][real].mean()))
    close(mean["judge/all_failed"], 2 / 8)
    bare = {k: batch[k] for k in ("mask", "logp_old", "logp_ref", "adv")}  # the record of the credit may be missing
    assert not {"credit/flagged", "judge/failed"} & set(run_loss(out, bare, capo.Config(), [slice(None)])[2][0])


def test_later_passes_move_away_from_a_fixed_ratio():
    """The log-probs of the rollout stay: the first pass has ratio 1, and after a large step some clips act."""
    logits = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    mask, adv = torch.ones(4, 3, dtype=torch.bool), t64([[1.0] * 3, [-1.0] * 3, [0.5] * 3, [-0.5] * 3])
    seen = []
    for _ in range(4):
        logp = torch.nn.functional.logsigmoid(logits)
        old = seen[0][0] if seen else logp.detach()
        batch = dict(logp_old=old, logp_ref=old, mask=mask, adv=adv)
        total, names = capo.loss(
            dict(logp=logp, entropy=logp), batch, capo.Config(), pre=None, denom=capo.denominators(batch, capo.Config())
        )
        seen.append((logp.detach(), float(names["policy/ratio/max"][0]), int(names["policy/clip_frac"][0])))
        (grad,) = torch.autograd.grad(total, logits)
        logits.data -= 30 * grad
    assert seen[0][1] == 1.0 and seen[0][2] == 0 and seen[-1][1] > 1.2 and seen[-1][2] > 0


# ------------------------------------------------------------------------------------------------- what the loop calls


def iteration(seed=0):
    """The global batch of an iteration, as the trainer makes it, and the byte tokens of each reply."""
    rng = random.Random(seed)
    n = rng.randint(4, 12)
    texts = [random_reply(rng) for _ in range(n)]
    tokens, finished = [cut(text, rng) for text in texts], [rng.random() < 0.8 for _ in range(n)]
    offsets = [capo.token_offsets(row, decode) + [(len(text), len(text))] * done for row, text, done in zip(tokens, texts, finished)]
    width = max(map(len, offsets)) + rng.randint(0, 2)
    mask = torch.zeros(n, width, dtype=torch.bool)
    for row, spans in zip(mask, offsets):
        row[sorted(rng.sample(range(width), len(spans))) if seed % 2 else slice(len(spans))] = True
    critiques = [[rng.choice([random_critique(rng), random_critique(rng), None]) for _ in range(4)] for _ in range(n)]
    critiques[0], critiques[1] = [None, "?"], {1: 0.5}
    return dict(
        group=[rng.choice([11, 4]) for _ in range(n)], traj=[100 + 3 * i for i in range(n)], step=[0] * n, mask=mask, response=texts,
        offsets=offsets, critiques=critiques, correct=[rng.random() < 0.5 for _ in range(n)], finished=finished,
    ), tokens  # fmt: skip


def expected_credit(batch, tokens, cfg):
    """(advantages, weights of the tokens' steps, well formed, share of failed critiques) by the slow loops."""
    rewards, flagged, good, failed = [], [], [], []
    for i, text in enumerate(batch["response"]):
        spans = oracle.split_steps(text)
        weights, critiques = batch["critiques"][i], batch["critiques"][i]
        failed.append(0.0)
        if isinstance(critiques, list):
            read = [None if c is None else oracle.parse_critique(c, len(spans)) for c in critiques]
            weights, failed[-1] = oracle.vote(read, cfg.vote), sum(c is None for c in read) / len(read)
        steps = oracle.token_steps(oracle.token_starts(tokens[i]), spans, n_eos=int(batch["finished"][i]))
        good.append(oracle.well_formed(text, batch["finished"][i]))
        rewards.append(oracle.token_rewards(steps, weights, batch["correct"][i], good[-1], cfg.C, cfg.P, cfg.format_reward))
        flagged.append([weights.get(s, 0.0) for s in steps])
    return oracle.advantages(rewards, batch["group"]), flagged, good, failed


@pytest.mark.parametrize("block", range(4))
def test_oracle_iteration(block):
    for seed in range(50 * block, 50 * block + 50):
        batch, tokens = iteration(seed)
        cfg = capo.Config(vote=sorted(capo.VOTES)[seed % 6], P=(1.0, 0.0, 0.1)[seed % 3], format_reward=(0.2, 0.0)[seed % 2])
        result, (adv, flagged, good, failed) = capo.advantages(batch, cfg), expected_credit(batch, tokens, cfg)
        mask = batch["mask"]
        for name, rows in (("adv", adv), ("flagged", flagged)):
            assert result[name].shape == mask.shape and result[name].dtype == torch.float32
            close(result[name][mask], [x for row in rows for x in row], 1e-5)
            assert (result[name][~mask] == 0).all()
        close(result["well_formed"], [[float(x)] for x in good])
        close(result["critique_failed"], [[x] for x in failed], 1e-6)


def whole_group(**changes):
    """Two finished answers of one prompt: right with a wrong second step, and wrong."""
    texts = ["a\n\nb\n\n\\boxed{3}", "c\n\n\\boxed{4}"]
    offsets = [[(0, 3), (3, 6), (6, 15), (15, 15)], [(0, 3), (3, 12), (12, 12)]]
    mask = torch.arange(4) < torch.tensor([[4], [3]])
    batch = dict(group=[0, 0], traj=[7, 8], response=texts, offsets=offsets, mask=mask, correct=[1, 0], finished=[True, True],
                 critiques=[[critique("2")], [critique("")]])  # fmt: skip
    return batch | changes


def test_iteration_by_hand():
    rewards = [2.2, 1.2, 2.2, 2.2, 0.2, 0.2, 0.2]
    expected = oracle.normalise(rewards)
    result = capo.advantages(whole_group(), capo.Config())
    close(result["adv"], [expected[:4], [*expected[4:], 0.0]], 1e-6)
    assert result["flagged"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert result["well_formed"].tolist() == [[1.0], [1.0]] and result["critique_failed"].tolist() == [[0.0], [0.0]]


def test_only_a_well_formed_answer_is_right():
    """Cut before the end token, or without a box: no outcome and no format reward, however the verifier read it."""
    for change in (dict(finished=[False, True]), dict(response=["a\n\nb\n\n-boxed{3}", "c\n\n\\boxed{4}"])):
        result = capo.advantages(whole_group(**change), capo.Config(P=0.0))
        close(result["adv"][0], [oracle.normalise([0.0] * 4 + [0.2] * 3)[0]] * 4, 1e-6)
        assert result["well_formed"].tolist() == [[0.0], [1.0]]


def test_every_setting_reaches_the_credit():
    batch = whole_group(critiques=[[critique("2"), critique("1, 2"), critique("3")], [critique("1")]])
    results = [
        capo.advantages(batch, capo.Config(**change))["adv"]
        for change in ({}, dict(vote="union"), dict(C=3.0), dict(P=0.5), dict(vote="average"), dict(vote="intersection"))
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(results, 2))
    bonus = [capo.advantages(whole_group(finished=[False, True]), capo.Config(format_reward=x))["adv"] for x in (0.2, 0.5)]
    assert not torch.equal(*bonus)


def test_a_tied_group_gives_exactly_zero():
    batch = whole_group(correct=[0, 0], critiques=[[critique("none")]] * 2)
    assert (capo.advantages(batch, capo.Config())["adv"] == 0).all()
    assert (capo.advantages(whole_group(correct=[1, 1]), capo.Config(P=0.0))["adv"] == 0).all()


def test_rows_without_tokens_change_nothing():
    more = whole_group(
        group=[0, 0, None], traj=[7, 8, 9], correct=[1, 0, 0], finished=[True, True, False], critiques=[[critique("2")], [critique("")], []]
    )
    more |= dict(
        response=[*more["response"], ""],
        offsets=[*more["offsets"], []],
        mask=torch.cat([more["mask"], torch.zeros(1, 4, dtype=torch.bool)]),
    )
    result, plain = capo.advantages(more, capo.Config()), capo.advantages(whole_group(), capo.Config())
    assert torch.equal(result["adv"][:2], plain["adv"]) and (result["adv"][2] == 0).all()


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_per_row_arguments_may_be_lists_numpy_or_torch(convert):
    batch = whole_group()
    for name in ("group", "traj", "correct", "finished"):
        batch[name] = convert(batch[name])
    batch["mask"] = batch["mask"].numpy() if convert is np.array else batch["mask"]
    assert torch.equal(capo.advantages(batch, capo.Config())["adv"], capo.advantages(whole_group(), capo.Config())["adv"])
    with pytest.raises(ValueError, match="rollout 8"):
        capo.advantages(batch | {"critiques": [[], {5: 1.0}]}, capo.Config())


def test_inputs_are_not_written():
    batch, _ = iteration(3)
    before = {k: json.dumps(v) for k, v in batch.items() if k != "mask"}
    mask = batch["mask"].clone()
    capo.advantages(batch, capo.Config())
    assert before == {k: json.dumps(v) for k, v in batch.items() if k != "mask"} and torch.equal(mask, batch["mask"])


# ------------------------------------------------------------------------------------------------- settings, bad input


def test_defaults_are_the_papers():
    cfg = capo.Config()
    assert (cfg.C, cfg.P, cfg.format_reward, cfg.vote, cfg.critiques) == (2.0, 1.0, 0.2, "majority", 4)
    assert (cfg.judge_temperature, cfg.judge_top_p, cfg.judge_tokens) == (0.7, 0.9, 2048)
    assert (cfg.eps, cfg.clip_width, cfg.kl_coef) == (0.2, 0.2, 0.01)
    assert not cfg.allow_inverted and not cfg.reference_solution
    vote = next(f for f in dataclasses.fields(cfg) if f.name == "vote")
    assert vote.type.__args__ == tuple(capo.VOTES)


def test_presets_are_the_papers():
    math_ = capo.PRESETS["paper"]["math"]
    settings_ = {name: math_[name] for name in ("tasks", "rollouts", "minibatch", "passes", "lr", "max_steps", "temperature", "vote")}
    assert settings_ == dict(tasks=12, rollouts=16, minibatch=192, passes=4, lr=1e-6, max_steps=1, temperature=0.7, vote="intersection")
    assert (math_["prompt_tokens"], math_["response_tokens"], math_["eval_temperature"]) == (2048, 2048, 0.0)
    assert set(capo.NEEDS) == {"reference", "judge", "groups"}


@pytest.mark.parametrize(
    "name,bad,good",
    [("C", -1.0, 9.0), ("C", NAN, 9.0), ("P", -0.1, 0.0), ("P", NAN, 0.0), ("format_reward", -0.2, 0.0), ("judge_temperature", -1.0, 0.0),
     ("eps", -0.1, 0.0), ("kl_coef", -0.01, 0.0), ("critiques", 0, 1), ("judge_tokens", 0, 1), ("judge_top_p", 1.1, 1.0),
     ("judge_top_p", -0.1, 0.5)],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused_by_name(name, bad, good):
    with pytest.raises(ValueError, match=f"^{name} {bad}: give a number from"):
        capo.Config(**{name: bad})
    assert getattr(capo.Config(**{name: good}), name) == good


@pytest.mark.parametrize("C,P", [(2.0, 2.0), (2.0, 5.0), (0.0, 0.0)])
def test_a_penalty_above_the_outcome_has_to_be_asked_for(C, P):
    with pytest.raises(ValueError, match=f"C {C} is not above P {P}: .*allow_inverted"):
        capo.Config(C=C, P=P)
    assert capo.Config(C=C, P=P, allow_inverted=True).P == P


def test_unknown_votes_are_refused_with_those_that_exist():
    for call in (lambda: capo.Config(vote="plurality"), lambda: capo.vote([{1}], "plurality")):
        with pytest.raises(
            ValueError, match="^vote plurality: give one of intersection, majority, majority_strict, union, greedy, average.$"
        ):
            call()


@pytest.mark.parametrize("weights", [{1: NAN}, {2: -0.5}, {1: 0.5, 3: 1.5}, {0: 1.0}, {4: 1.0}, {1: INF}, {"1": 1.0}])
def test_weights_that_cannot_be_used_name_the_rollout(weights):
    with pytest.raises(ValueError, match="^rollout 7: the judge gives step .* the weight .*; give steps 1 to 3 weights from 0 to 1.$"):
        capo.advantages(whole_group(critiques=[weights, []]), capo.Config())


def test_a_judge_may_weigh_the_steps_itself():
    result = capo.advantages(whole_group(critiques=[{1: 0.25, 2: 1, 3: 0.0}, {}]), capo.Config(vote="intersection"))
    assert result["flagged"][0].tolist() == [0.25, 1.0, 0.0, 0.0] and result["critique_failed"].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("correct", [NAN, None, 2, 0.5, "yes"])
def test_a_verifier_that_says_neither_names_the_rollout(correct):
    with pytest.raises(ValueError, match="^rollout 8: the verifier says .*; give 0 or 1.$"):
        capo.advantages(whole_group(correct=[1, correct]), capo.Config())


def test_an_offset_for_each_token():
    batch = whole_group()
    batch["offsets"][1] = batch["offsets"][1][:-1]
    with pytest.raises(ValueError, match="^rollout 8: 2 token offsets for 3 sampled tokens; .* the end token included.$"):
        capo.advantages(batch, capo.Config())
    with pytest.raises(AssertionError, match="mask must be bool"):
        capo.advantages(whole_group(mask=torch.ones(2, 4)), capo.Config())


def test_worked_example_shows_what_the_code_computes(capsys):
    capo.example()
    printed = capsys.readouterr().out
    tables = [line.split() for line in printed.splitlines()]
    assert "nan" not in printed
    votes = {line[0]: [float(x) for x in line[1:]] for line in tables if line and line[0] in capo.VOTES and len(line) == 5}
    assert set(votes) == set(capo.VOTES) and votes["average"] == [0.25, 1.0, 0.5, 0.75] and votes["majority"] == [0.0, 1.0, 1.0, 1.0]
    rows = [line.split("|")[1].split() for line in printed.splitlines() if re.match(r"\s+[01]  ['e]", line)]
    assert [float(r) for r, _ in rows] == [2.0] * 2 + [1.0] * 6 + [0.0] * 2
    close([float(a) for _, a in rows], [1.5] * 2 + [0.0] * 6 + [-1.5] * 2, 1e-5)
