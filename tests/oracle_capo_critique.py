"""CAPO-critique once more, as slow plain-Python loops over floats and lists: no tensor, no mask, no padding.

A rollout is the list of its response tokens, the end token included. Derivatives are worked out by hand. "Choice:" marks
what paper and equations leave open. `tests/test_capo_critique.py` compares the module with this file; neither imports the
other's code.
"""
import math
import re

OPEN_OR_CLOSE = re.compile(r"<(/?)incorrect_steps>", re.IGNORECASE | re.ASCII)
VOTES = ("intersection", "majority", "majority_strict", "union", "greedy", "average")


# ---------------- steps of a response
def split_steps(text):
    """text -> list of (start, end), character spans that tile the text; step k is entry k-1; never an empty list."""
    starts = []  # first character of each piece that is not only white space
    i = 0
    while i < len(text):
        j = i  # text[i:j] will be one piece: up to the next run of two or more newlines
        while j < len(text) and text[j:j + 2] != "\n\n":
            j += 1
        if text[i:j].strip() != "":
            starts.append(i)  # Choice: blanks that lead a piece are in the piece, not in the separator before it
        while j < len(text) and text[j] == "\n":
            j += 1
        i = j
    if not starts:
        starts = [0]
    starts[0] = 0  # leading space goes to step 1
    ends = starts[1:] + [len(text)]  # a separator (and a dropped piece) goes to the step before it
    return [(s, e) for s, e in zip(starts, ends)]


def step_tags_ok(tagged, n):
    """True if the tagged steps shown to the judge hold exactly <step_1>..</step_1> .. <step_n>..</step_n>, in order, no forged tag."""
    want = []
    for k in range(1, n + 1):
        want += [f"<step_{k}>", f"</step_{k}>"]
    return re.findall(r"<\s*/?\s*step_\d+\s*>", tagged, re.IGNORECASE) == want and not OPEN_OR_CLOSE.search(tagged)


def char_of_byte(data):
    """UTF-8 bytes -> for each byte the index of the decoded character (errors="replace") that it is a part of."""
    owner, p, index = [], 0, 0
    while p < len(data):
        for size in range(1, 5):
            try:
                data[p:p + size].decode("utf-8")
                break  # one whole character
            except UnicodeDecodeError:
                pass
        else:
            try:
                data[p:].decode("utf-8")
            except UnicodeDecodeError as err:
                size = err.end  # broken bytes: they are one U+FFFD
        owner += [index] * size
        p, index = p + size, index + 1
    return owner


def token_starts(pieces):
    """pieces: per token its raw bytes, or its text (str), no EOS -> index of its first character in the decoded whole:
    the character that its first byte is a part of. A token without bytes gets the position where it stands."""
    pieces = [p.encode("utf-8") if isinstance(p, str) else p for p in pieces]
    owner = char_of_byte(b"".join(pieces))
    owner.append(owner[-1] + 1 if owner else 0)
    return [owner[sum(len(p) for p in pieces[:t])] for t in range(len(pieces))]


def token_steps(starts, spans, n_eos=0):
    """starts: first-character index per token (EOS not among them), spans of split_steps, n_eos: EOS tokens at the end (0 or 1)
    -> 1-based step per token. Position = len(text) (no character left): last step."""
    steps = []
    for s in starts:
        step = len(spans)
        for k, (a, b) in enumerate(spans, 1):
            if a <= s < b:
                step = k
        steps.append(step)
    return steps + [len(spans)] * n_eos


# ---------------- judge
def parse_critique(text, n):
    """Critique text, number of steps n -> sorted list of wrong step ids in 1..n, or None for a failed critique."""
    content, opened = None, None
    for tag in OPEN_OR_CLOSE.finditer(text):
        if tag.group(1) == "":
            opened = tag.end()  # the last opening tag before a closing tag counts
        elif opened is not None:
            content, opened = text[opened:tag.start()], None  # Choice: a second closing tag closes nothing
    if content is None:
        return None
    content = content.strip().lower()
    if content.endswith("."):
        content = content[:-1]  # Choice: one full stop, at the end of the list only
    items = [part.split() for part in content.split(",")]
    words = [w for part in items for w in part]
    if words == [] or words == ["none"] or words == ["n/a"] or words == ["[]"]:
        return []
    found = set()
    for part in items:
        i = 0
        while i < len(part):
            word = part[i]
            if word == "step" and i + 1 < len(part):  # "step 3", white space of any length
                i += 1
                word = part[i]
            elif word.startswith("step_"):
                word = word[len("step_"):]
            if not re.fullmatch(r"[+-]?[0-9]+", word):  # Choice: ASCII digits; "step3", "#3", "[3]", "1-3", "1 and 2": unreadable
                return None
            digits = word.lstrip("+-").lstrip("0") or "0"
            value = int(digits) if len(digits) <= 18 else n + 1
            if word[0] != "-" and 1 <= value <= n:
                found.add(value)
            i += 1
    return sorted(found)


def vote(critiques, how):
    """critiques: list (k samples) of lists of step ids, None = failed; how: one of VOTES -> {step: weight > 0}."""
    readable = [set(c) for c in critiques if c is not None]  # failed ones are left out of k
    k = len(readable)
    if k == 0:
        return {}  # all failed: no step is wrong
    weights = {}
    for s in sorted(set().union(*readable)):
        count = sum(1 for c in readable if s in c)
        w = {"intersection": float(count == k), "majority": float(2 * count >= k), "majority_strict": float(2 * count > k),
             "union": float(count >= 1), "greedy": float(s in readable[0]),  # Choice: the first readable critique
             "average": count / k}[how]
        if w > 0:
            weights[s] = w
    return weights


def judge_counts(rollouts):
    """rollouts: per rollout its k critiques (None = failed) -> (failed critiques, rollouts whose critiques all failed)."""
    failed = sum(1 for critiques in rollouts for c in critiques if c is None)
    return failed, sum(1 for critiques in rollouts if critiques and all(c is None for c in critiques))


# ---------------- rewards and advantages
def well_formed(text, finished):
    """Reply text, finished by EOS? -> finished, and the last \\boxed{ closes with something in it.

    Choice: white space is nothing; \\{ and \\} are no braces (LaTeX); an unclosed last box is not saved by an earlier one."""
    at = text.rfind("\\boxed{")
    if not finished or at < 0:
        return False
    start = i = at + len("\\boxed{")
    depth = 1
    while i < len(text):
        if text[i] == "\\":
            i += 1  # skip the escaped character
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return text[start:i].strip() != ""
        i += 1
    return False


def token_rewards(steps, weights, correct, well, C=2.0, P=1.0, format_reward=0.2, allow_inverted=False):
    """Eq. 1 for one rollout: steps = 1-based step per token, weights = {step: weight}, correct = verifier 0/1, well = well-formed?
    -> reward per token. r_v = correct and well-formed; the format reward is added on every token if well-formed."""
    if C <= P and not allow_inverted:
        raise ValueError("C <= P")
    r_v = 1.0 if correct and well else 0.0
    return [r_v * C - P * weights.get(s, 0.0) + (format_reward if well else 0.0) for s in steps]


def is_tied(xs):
    """max - min <= 1e-12 * max(1, max|x|)"""
    return max(xs) - min(xs) <= 1e-12 * max(1.0, max(abs(x) for x in xs))


def normalise(xs):
    """(x - mean) / (sample std + 1e-6); fewer than two, or tied: zeros. Also GRPO's advantage of the replies' scalar rewards."""
    if len(xs) < 2 or is_tied(xs):
        return [0.0] * len(xs)
    mean = math.fsum(xs) / len(xs)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in xs) / (len(xs) - 1))
    return [(x - mean) / (std + 1e-6) for x in xs]


def advantages(rewards, groups=None):
    """Eq. 2: rewards[i][j] per rollout and token, groups[i] = prompt group id (None = padding row; no list: one group)
    -> A[i][j], normalised over all tokens of all rollouts of the group, pooled. Padding rows: zeros."""
    if groups is None:
        groups = [0] * len(rewards)
    out = [[0.0] * len(row) for row in rewards]
    for g in set(groups) - {None}:
        where = [(i, j) for i in range(len(rewards)) if groups[i] == g for j in range(len(rewards[i]))]
        for (i, j), a in zip(where, normalise([rewards[i][j] for i, j in where])):
            out[i][j] = a
    return out


# ---------------- loss
def clip(x, low, high):
    return min(max(x, low), high)



def policy_term(logp, logp_old, A, eps=0.2):
    """One token -> (loss term, its derivative by logp, is the clip acting?). Plain PPO clip, no dual clip."""
    z = logp - logp_old
    ratio = math.exp(clip(z, -20.0, 20.0))
    plain, clipped = ratio * A, clip(ratio, 1.0 - eps, 1.0 + eps) * A
    acting = clipped < plain
    return -min(plain, clipped), 0.0 if acting or abs(z) > 20.0 else -ratio * A, acting


def kl_term(logp, logp_ref):
    """low_var_kl of one token -> (penalty, its derivative by logp)"""
    d = logp_ref - logp
    x = clip(d, -20.0, 20.0)
    raw = math.exp(x) - x - 1.0
    return clip(raw, -10.0, 10.0), 0.0 if raw > 10.0 or abs(d) > 20.0 else 1.0 - math.exp(x)


def loss(logp, logp_old, logp_ref, A, denominator=None, eps=0.2, kl_coef=0.01):
    """All [rollout][token]; denominator = tokens of the whole mini-batch (default: the tokens given)
    -> dict(policy, kl, total, grad): token means, total = policy + kl_coef * kl, grad[i][j] = d total / d logp[i][j].
    Parts of a mini-batch given the same denominator add up. No tokens: 0."""
    n = sum(len(row) for row in logp) if denominator is None else denominator
    policy, kl, grad = [], [], []
    for i in range(len(logp)):
        grad.append([])
        for j in range(len(logp[i])):
            p, dp, _ = policy_term(logp[i][j], logp_old[i][j], A[i][j], eps)
            k, dk = (0.0, 0.0) if logp_ref is None else kl_term(logp[i][j], logp_ref[i][j])
            policy.append(p / n)
            kl.append(k / n)
            grad[i].append((dp + kl_coef * dk) / n)
    policy, kl = math.fsum(policy), math.fsum(kl)
    return dict(policy=policy, kl=kl, total=policy + kl_coef * kl, grad=grad)
