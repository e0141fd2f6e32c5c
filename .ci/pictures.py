"""The pictures of the pages, as SVG: drawn from committed results where they show numbers.

``python .ci/pictures.py`` writes ``docs/images/*.svg``. A test compares them with what this draws.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 760
INK, FAINT, PAPER = "#222222", "#595959", "#ffffff"
KV, KV_PALE = "#2f5f9e", "#e6eefa"
ROWS, ROWS_PALE = "#8a5200", "#fdf0dc"
RIGHT, WRONG = "#2e7d5b", "#b3261e"


class Picture:
    """Shapes on a light card, which is readable on a dark page, too. Lengths are in units of 1/760 of the width."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height, self.parts = title, height, list[str]()
        self.text(20, 32, title, size=17, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        color: str = INK,
        bold: bool = False,
        at: str = "start",
        over: bool = False,
    ) -> None:
        """``over``: a line below it is interrupted."""
        more = ' font-weight="bold"' if bold else ""
        if over:
            more += f' paint-order="stroke" stroke="{PAPER}" stroke-width="5"'
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{at}"{more}>'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, *, fill: str, line: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{line}"/>'
        )

    def line(self, path: str, *, color: str = INK, head: bool = True, tail: bool = False, dashed: bool = False) -> None:
        ends = (' marker-end="url(#head)"' if head else "") + (' marker-start="url(#head)"' if tail else "")
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" stroke="{color}" stroke-width="1.6" fill="none"{ends}{dash}/>')

    def dot(self, x: float, y: float, color: str, *, hollow: bool = False) -> None:
        fill = f'"{PAPER}" stroke="{color}" stroke-width="1.6"' if hollow else f'"{color}"'
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{4 if hollow else 5}" fill={fill}/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif"><title>{escape(self.title)}</title>'
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker></defs>'
        )
        card = f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="{PAPER}"/>'
        return "\n".join([head, card, *self.parts, "</svg>", ""])


def flow() -> Picture:
    """What each band is stands in it, at its left."""
    picture = Picture("Where a KV block goes, its rows go", 372)
    picture.box(14, 50, 732, 116, fill=KV_PALE)
    picture.box(14, 210, 732, 116, fill=ROWS_PALE)
    for y, color, words in (
        (92, KV, ("KV blocks:", "the engine", "copies them")),
        (252, ROWS, ("rows: kvroute", "copies them by", "the same pairs")),
    ):
        for i, word in enumerate(words):
            picture.text(26, y + 20 * i, word, color=color, bold=True)
    columns = {"device": (160, "block 2"), "host": (320, "block 1"), "store": (480, "key a7c2")}
    for name, (x, block) in columns.items():
        for y, color, what in ((66, KV, f"KV, {name}"), (226, ROWS, f"rows, {name}" if name != "store" else "record")):
            picture.box(x, y, 120, 84, fill=PAPER, line=color)
            picture.text(x + 60, y + 24, what, color=color, bold=True, at="middle")
            for i in range(4):
                held = i == {"device": 2, "host": 1, "store": 3}[name]
                picture.box(x + 12 + 25 * i, y + 34, 21, 21, fill=color if held else PAPER, line=color)
            picture.text(x + 60, y + 74, block, size=13, color=INK, at="middle")
    picture.box(640, 226, 96, 84, fill=PAPER, line=ROWS)
    picture.text(688, 250, "trainer", color=ROWS, bold=True, at="middle")
    for i, word in enumerate(("ids, or", "missing")):
        picture.text(688, 274 + 20 * i, word, at="middle")
    for y in (108, 268):
        picture.line(f"M284 {y} H316", tail=True)
        picture.line(f"M444 {y} H476", tail=True)
    picture.text(360, 193, "the same pairs of blocks, the same keys", at="middle")
    for x in (186, 534):
        picture.line(f"M{x} 170 V206", tail=True, dashed=True)
    picture.line("M220 314 C220 356 688 356 688 314")
    picture.text(454, 364, "read: byte for byte, or reported missing", at="middle")
    return picture


def wrong_rows() -> Picture:
    """From the table of ``docs/sglang.md`` and that of the results of an H100."""
    page = (ROOT / "docs" / "sglang.md").read_text()
    here = re.search(
        r"\| SGLang's own pages on the host \(HiCache\) \| ([\d,]+), \*\*([\d,]+)\*\* \| ([\d,]+), 0, 0", page
    )
    gpu = (ROOT / "bench" / "results" / "sglang-h100" / "README.md").read_text()
    there = re.search(r"\| SGLang \| ([\d,]+) \| \*\*([\d,]+)\*\* \| 0 \|", gpu)
    ours = re.search(r"\| with kvroute \| ([\d,]+) \| (\d+) \| (\d+) \|", gpu)
    assert here
    assert there
    assert ours
    right, wrong, kept = (number(text) for text in here.groups())
    runs = [
        ("SGLang 0.5.23 on a CPU, KV from the host: every row of the answers", [
            ("stock", right + wrong, wrong), ("with kvroute", kept, 0)]),
        ("SGLang 0.5.23 on an H100, KV from the host: rows of cached tokens", [
            ("stock", number(there[1]), number(there[2])), ("with kvroute", number(ours[1]), number(ours[2]))]),
    ]  # fmt: skip
    picture = Picture("Rows that were wrong, with no error", 288)
    y = 66
    for what, bars in runs:
        picture.text(20, y, what, color=FAINT)
        for name, rows, bad in bars:
            y += 12
            picture.text(20, y + 20, name, bold=name != "stock")
            length = 400 * (rows - bad) / rows
            picture.box(124, y, length, 28, fill=RIGHT)
            if bad:
                picture.box(124 + length, y, 400 - length, 28, fill=WRONG)
            words = f"{bad:,} of {rows:,} wrong"
            picture.text(536, y + 20, words, color=WRONG if bad else RIGHT, bold=True)
            y += 28
        y += 38
    return picture


def number(text: str) -> int:
    return int(text.replace(",", ""))


def cost() -> Picture:
    """From the table of the results of an H200: medians and quartiles, those beyond the axis by name."""
    page = (ROOT / "bench" / "results" / "vllm-h200" / "README.md").read_text()
    heads = re.search(r"^\| sequences \| target \| (.+) \|$", page, re.MULTILINE)
    assert heads
    columns = heads[1].split(" | ")
    cell = re.compile(r"([\d.]+) \[([\d.]+) \.\. ([\d.]+)\]")
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| (.+) \|$", page[heads.end() :], re.MULTILINE)[:3]
    low, high, top, bottom = 0.84, 1.04, 70, 330
    picture = Picture("Tokens per second with kvroute, of those without", 404)
    picture.text(
        20, 54, "vLLM 0.32, one H200, the shape of Qwen3-30B-A3B; dots: medians, lines: quartiles", color=FAINT
    )

    def height(share: float) -> float:
        return bottom - (min(max(share, low), high) - low) / (high - low) * (bottom - top)

    for share in (0.85, 0.90, 0.95, 1.00):
        picture.line(f"M70 {height(share):g} H740", color="#dddddd", head=False)
        picture.text(60, height(share) + 5, f"{share:.2f}", color=FAINT, at="end")
    target = float(rows[0][1])
    picture.line(f"M70 {height(target):g} H740", color=FAINT, head=False, dashed=True)
    picture.text(740, height(target) + 16, f"target {target}", size=13, color=FAINT, at="end")
    for i, (sequences, _, cells) in enumerate(rows):
        left = 90 + 220 * i
        picture.text(left + 100, 362, f"{sequences} sequences", at="middle", bold=True)
        measured = zip(columns, cell.findall(cells), strict=True)
        for j, (column, texts) in enumerate(sorted(measured, key=lambda pair: "one step" in pair[0])):
            median, first, third = map(float, texts)
            color, x = (ROWS if "one step" in column else KV), left + 12 + 30 * j + (12 if j > 2 else 0)
            picture.line(f"M{x:g} {height(first):g} V{height(third):g}", color=color, head=False)
            picture.dot(x, height(median), color)
            for quartile, beyond, dy in ((first, first < low, 14), (third, third > high, -6)):
                if beyond:
                    picture.text(x, height(quartile) + dy, f"{quartile:.2f}", size=12, color=color, at="middle")
    for x, color, words in ((90, KV, "answers end one after another"), (400, ROWS, "all answers end in one step")):
        picture.dot(x, 382, color)
        picture.text(x + 12, 387, words)
    return picture


def life() -> Picture:
    """Four lanes over time: what happens to the blocks, and to the rows in them."""
    picture = Picture("Lives of a block: its generation decides which rows are readable", 372)
    deep = "#f4c887"
    lanes = ((76, "device, block 7"), (146, "host, block 3"), (216, "device, block 2"), (286, "store, key a7c2"))
    for y, name in lanes:
        picture.text(20, y + 22, name, bold=True)
    picture.line("M274 112 V284")
    picture.text(266, 206, "persist", size=13, at="end")
    picture.line("M330 112 V143")
    picture.text(338, 134, "swap_out", size=13)
    picture.line("M560 182 V213")
    picture.text(568, 204, "swap_in", size=13)
    for x, y, width, fill, words in (
        (150, 76, 50, ROWS_PALE, ""),
        (200, 76, 250, deep, "generation 7: readable"),
        (450, 76, 296, KV_PALE, "generation 8: another request"),
        (318, 146, 254, deep, "the same rows"),
        (548, 216, 198, deep, "the same rows"),
        (262, 286, 484, deep, "a record: key, origin, rows, checksum"),
    ):
        picture.box(x, y, width, 34, fill=fill, line=ROWS)
        picture.text(x + width / 2, y + 22, words, at="middle")
    for x, words in ((150, "renew"), (216, "commit"), (450, "renew: given out again")):
        picture.text(x, 66, words, size=13, color=FAINT, at="middle")
    picture.line("M410 114 C440 132 500 132 518 124", color=WRONG, dashed=True, head=False)
    picture.text(524, 132, "x  late work of 7 is dropped", color=WRONG)
    picture.text(
        20,
        352,
        "Where the KV goes, the rows go, by the same pairs; a new life reads nothing of an old one.",
        color=FAINT,
    )
    return picture


def crossing() -> Picture:
    picture = Picture("Prefill and decode apart: KV and rows cross, each by its own way", 390)
    for x, name, color in ((90, "client", INK), (340, "prefill", KV), (640, "decode", KV)):
        picture.box(x - 60, 52, 120, 30, fill=PAPER, line=color)
        picture.text(x, 72, name, bold=True, color=color, at="middle")
        picture.line(f"M{x} 82 V372", color="#bbbbbb", head=False)
    picture.box(330, 108, 20, 204, fill=KV)
    picture.box(630, 196, 20, 152, fill=KV)

    def arrow(y: int, start: int, end: int, words: str, color: str = INK, middle: float = 0) -> None:
        picture.line(f"M{start} {y} H{end}", color=color)
        picture.text(middle or (start + end) / 2, y - 7, words, color=color, at="middle", over=True)

    arrow(118, 90, 328, "1. the prompt")
    arrow(156, 330, 94, "2. a token and a ticket")
    picture.line("M90 206 H328", head=False)
    picture.line("M352 206 H628")
    picture.text(210, 199, "3. prompt and ticket", at="middle")
    arrow(238, 352, 628, "4. KV, by the engine's connector", KV)
    arrow(270, 352, 628, "5. rows: lent blocks, fetched", ROWS)
    arrow(302, 628, 354, "6. received: the loan is over", FAINT)
    arrow(344, 630, 94, "7. the answer and its rows; what did not come is missing, and why")
    return picture


STUDY = ROOT / "bench" / "results" / "replay-rows-h200" / "replay-study.json"
FAMILY_COLORS = {"qwen3_moe": (KV, "Qwen3-MoE"), "deepseek_v3": (ROWS, "DeepSeek-V3")}
REPLAYED = {
    "none": "no replay",
    "right": "right rows",
    "missing": "wrong ones missing",
    "evicted": "rows after eviction",
    "evicted-prompt": "the same, prompt only",
    "shifted": "shifted by one token",
    "zeros": "zeros for missing",
}


def replay_rows() -> Picture:
    """From the results of the replay study: a dot for each seed's weights."""
    measured = json.loads(STUDY.read_text())["measured"]
    picture = Picture("What wrong rows do: KL of engine and trainer, by the rows it replays", 450)
    picture.text(
        20, 54, "one H200, models of 0.3 billion parameters, answers of 4,032 tokens, three weights", color=FAINT
    )
    left, right, top = 200, 735, 86
    low, high = -6, 1

    def across(kl: float) -> float:
        return left + (math.log10(kl) - low) / (high - low) * (right - left)

    bottom = top + 40 * len(REPLAYED) + 6
    for decade in range(low, high + 1):
        x = left + (decade - low) / (high - low) * (right - left)
        picture.line(f"M{x:g} {top - 14} V{bottom}", color="#dddddd", head=False)
        picture.text(x, bottom + 18, f"1e{decade}" if decade else "1", size=13, color=FAINT, at="middle")
    for number, (rows, words) in enumerate(REPLAYED.items()):
        y = top + 12 + 40 * number
        good = rows in ("right", "missing")
        picture.text(left - 14, y + 5, words, bold=good, color=RIGHT if good else INK, at="end")
        for (family, (color, _)), dy in zip(FAMILY_COLORS.items(), (-8, 8), strict=True):
            for lag in (8, 0):
                for each in measured:
                    if (each["family"], each["rows"], each["lag"], each["part"]) == (family, rows, lag, "all"):
                        picture.dot(across(each["figures"]["kl"]), y + dy, color, hollow=lag == 8)
    y = bottom + 44
    for i, (color, name) in enumerate(FAMILY_COLORS.values()):
        picture.dot(26 + 150 * i, y - 5, color)
        picture.text(38 + 150 * i, y, name)
    picture.dot(326, y - 5, INK)
    picture.text(338, y, "the same weights")
    picture.dot(476, y - 5, INK, hollow=True)
    picture.text(488, y, "the trainer 8 steps ahead")
    return picture


RATIOS = {"engine": "ratio to the engine's", "trainer": "ratio to the trainer's own"}
TRAINING_COLORS = {"none": FAINT, "evicted": WRONG}


def replay_training(study: Path = STUDY) -> Picture:
    """From the same results: the reward of each step, the mean over the weights, less that with right rows. A row of
    panels for each ratio that policy gradient was run with, and in it one for each family."""
    runs = [run for run in json.loads(study.read_text())["runs"] if run["steps"]]
    rows_of_panels = [
        (ratio, {family: panel for family in FAMILY_COLORS if (panel := _rewards(runs, ratio, family))})
        for ratio in RATIOS
        if any(run["old"] == ratio for run in runs)
    ]
    panels = [panel for _, families in rows_of_panels for panel in families.values()]
    less = [values for panel in panels for rows in TRAINING_COLORS for values in _less(panel, rows)]
    points = [value for values in less for value in values]
    scale = min(-6.0, 2 * math.floor(min(points) / 2)), max(2.5, max(points))
    legend = 101 + 264 * len(rows_of_panels)
    picture = Picture("Policy gradient: the reward of each step, less that with right rows", legend + 25)
    seeds = len({run["seed"] for run in runs})
    words = f"H200s, models of 0.3 billion parameters, mean and range of {seeds} sets of weights"
    picture.text(20, 54, words, color=FAINT)
    for number, (ratio, families) in enumerate(rows_of_panels):
        for column, (family, rewards) in enumerate(families.items()):
            title = f"{FAMILY_COLORS[family][1]}, {RATIOS[ratio]}"
            _training_panel(picture, title, rewards, scale, left=70 + 350 * column, top=96 + 264 * number)
    for i, (rows, color) in enumerate({"right": RIGHT, **TRAINING_COLORS}.items()):
        picture.dot(90 + 190 * i, legend, color)
        picture.text(102 + 190 * i, legend + 5, REPLAYED[rows])
    return picture


def _rewards(runs: list[dict[str, Any]], ratio: str, family: str) -> dict[tuple[str, int], list[float]]:
    """The rewards of a ratio's runs of one family, in percent, by rows and seed, of the steps that all of them have."""
    own = [run for run in runs if (run["old"], run["family"]) == (ratio, family)]
    steps = min((len(run["steps"]) for run in own), default=0)
    return {(run["rows"], run["seed"]): [100 * step["reward"] for step in run["steps"][:steps]] for run in own}


def _less(rewards: dict[tuple[str, int], list[float]], rows: str) -> list[list[float]]:
    """For each seed, the rewards with these rows less those with right ones, step by step."""
    return [
        [mine - right for mine, right in zip(own, rewards["right", seed], strict=True)]
        for (of, seed), own in rewards.items()
        if of == rows and ("right", seed) in rewards
    ]


def _training_panel(
    picture: Picture,
    title: str,
    rewards: dict[tuple[str, int], list[float]],
    scale: tuple[float, float],
    *,
    left: int,
    top: int,
) -> None:
    """One ratio and family; ``scale`` are the points at the panel's lower and upper edge."""
    (low, high), width, height = scale, 310, 210
    steps = len(next(iter(rewards.values())))
    picture.text(left, top - 14, title, bold=True)

    def place(step: int, points: float) -> tuple[float, float]:
        across = left + 14 + (width - 28) * step / max(1, steps - 1)
        return across, top + height - (points - low) / (high - low) * height

    for points in range(int(low), int(high) + 1, 2):
        y = place(0, points)[1]
        picture.line(f"M{left} {y:g} H{left + width}", color=RIGHT if points == 0 else "#dddddd", head=False)
        if left == 70:
            picture.text(left - 10, y + 5, f"{points:+d} %" if points else "0", color=FAINT, at="end")
    for step in range(steps):
        picture.text(place(step, low)[0], top + height + 20, str(step), size=13, color=FAINT, at="middle")
    for rows, color in TRAINING_COLORS.items():
        less = _less(rewards, rows)
        for step, values in enumerate(zip(*less, strict=True)):
            x, lowest = place(step, min(values))
            picture.line(f"M{x:.4g} {lowest:.4g} V{place(step, max(values))[1]:.4g}", color=color, head=False)
        means = [place(step, sum(values) / len(values)) for step, values in enumerate(zip(*less, strict=True))]
        path = " L".join(f"{x:.4g} {y:.4g}" for x, y in means)
        if path:
            picture.line(f"M{path}", color=color, head=False, dashed=rows == "none")


PICTURES = {
    "replay-rows": replay_rows,
    "replay-training": replay_training,
    "flow": flow,
    "wrong-rows": wrong_rows,
    "cost": cost,
    "life": life,
    "crossing": crossing,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
