"""Draws the six pictures of docs/how-it-works.md: one recorded step, worked through by redraft.decoding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from redraft.decoding.packing import pack_beams
from redraft.decoding.sampling import Sampler
from redraft.decoding.token_tree import TokenTree, mask_words
from redraft.decoding.verification import Verdict, walk
from redraft.request import SamplingConfig
from studies.figures.svg import CHARACTER, CHIP_HEIGHT, INK, MUTED, STYLES, Drawing

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
RECORDED = FOLDER / "one_step.json"
WIDTH = 720
out = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Example:
    """The recorded step, and what redraft.decoding makes of it."""

    recorded: dict[str, Any]

    @classmethod
    def load(cls, path: Path = RECORDED) -> Example:
        """Read the recorded step."""
        return cls(json.loads(path.read_text()))

    @cached_property
    def tree(self) -> TokenTree:
        """The packed tree of the beams."""
        beams = np.array([self.recorded["beams"]], np.int32)
        log_probs = np.array([self.recorded["log_probs"]], np.float32)
        return pack_beams(np.array([self.root], np.int32), beams, log_probs)

    @cached_property
    def verdict(self) -> Verdict:
        """The walk over the tree by the tokens that the target's rows gave."""
        sampling = SamplingConfig(temperature=self.recorded["temperature"], seed=self.recorded["seed"])
        tokens = np.array([row["token"] for row in self.recorded["target"]], np.int32)
        return walk(self.tree, 0, tokens, Sampler(sampling, []))

    @property
    def root(self) -> int:
        return self.recorded["step"]["input_ids"][0]

    @property
    def context(self) -> int:
        """Rows of the cache that are committed when the step begins."""
        return self.recorded["step"]["cache_lengths"][0]

    @property
    def depths(self) -> list[int]:
        return [path.bit_count() - 1 for path in self.tree.ancestors[0]]

    @property
    def masks(self) -> list[int]:
        """Each row's mask, one int32 word."""
        return mask_words(self.tree.ancestors[0], 1)

    def text(self, token: int) -> str:
        """A token's text without its leading space."""
        return self.recorded["texts"][str(token)].strip()

    def label(self, row: int) -> str:
        return self.text(self.tree.nodes[0][row][0])


def draft(example: Example) -> Drawing:
    """The root, the drafter and its beams with their cumulative probabilities."""
    d = Drawing(WIDTH, 244, "Draft: from the root, the drafter proposes three beams of three tokens")
    words, y = example.recorded["answer"].rsplit(" ", 1)[0], 128
    d.text(20, y + 5, words, 14, INK, mono=True)
    right = d.chip(20 + len(words) * CHARACTER + 8, y, example.label(0), "root")
    d.text(right - 17, y + 34, "root", 12, anchor="middle")
    box = 262
    d.arrow(f"M{right + 4:g} {y} H{box - 4}")
    d.box(box, y - 34, 118, 68, "context")
    d.text(box + 59, y - 4, "drafter", 14, INK, "middle", bold=True)
    d.text(box + 59, y + 15, "beam search", 12, anchor="middle")
    d.text(box + 59, y - 72, "hidden state of the target", 12, anchor="middle")
    d.arrow(f"M{box + 59} {y - 64} V{y - 38}")
    d.text(700, 26, "cumulative probability under each token", 12, anchor="end")
    for index, (beam, logs) in enumerate(zip(example.recorded["beams"], example.recorded["log_probs"], strict=True)):
        x, level = 468.0, 60 + 68 * index
        d.arrow(f"M{box + 122} {y} C{box + 150} {y} {box + 150} {level} {x - 5:g} {level}")
        for token, log in zip(beam, logs, strict=True):
            edge = d.chip(x, level, example.text(token))
            d.text((x + edge) / 2, level + 30, f"{100 * math.exp(log):.1f}%", 12, anchor="middle")
            x = edge + 20
    return d


def tree(example: Example) -> Drawing:
    """The beams with their repeated prefixes, and the tree that remains."""
    nodes = example.tree.nodes[0]
    drafted = sum(map(len, example.recorded["beams"]))
    d = Drawing(WIDTH, 250, "Tree: prefixes that beams share become one node")
    d.text(20, 28, f"{drafted} drafted tokens", 13, INK, bold=True)
    d.text(372, 28, f"{len(nodes) - 1} nodes and the root: {len(nodes)} rows", 13, INK, bold=True)
    child_at = {(parent, token): node for node, (token, parent, _) in enumerate(nodes)}
    met: set[int] = set()
    for index, beam in enumerate(example.recorded["beams"]):
        x, y, node = 20.0, 72 + 62 * index, 0
        for token in beam:
            node = child_at[node, token]
            new = node not in met
            met.add(node)
            x = d.chip(x, y, example.text(token), "draft" if new else "rejected", node if new else None, not new) + 12
    d.arrow("M316 134 H352")
    place_tree(d, example, 372, lambda node: "root" if node == 0 else "draft")
    d.text(20, 234, "dashed: the same prefix as a beam above", 12)
    return d


def place_tree(d: Drawing, example: Example, left: float, style: Callable[[int], str]) -> None:
    """Draw the tree from left to right."""
    nodes, depths = example.tree.nodes[0], example.depths
    children: dict[int, list[int]] = {node: [] for node in range(len(nodes))}
    for node, (_, parent, _) in enumerate(nodes[1:], 1):
        children[parent].append(node)
    heights: dict[int, float] = {}

    def place(node: int, free: float) -> float:
        for child in children[node]:
            free = place(child, free)
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
            return free
        heights[node] = free
        return free + 62

    place(0, 72)
    columns = [left]
    for depth in range(max(depths)):
        widest = max(len(example.label(node)) for node in range(len(nodes)) if depths[node] == depth)
        columns.append(columns[-1] + (widest + 2) * CHARACTER + 18 + 26)
    edges = {}
    for node in range(len(nodes)):
        x, y = columns[depths[node]], heights[node]
        edges[node] = (x, d.chip(x, y, example.label(node), style(node), node), y)
    for node, (_, parent, _) in enumerate(nodes[1:], 1):
        (_, x1, y1), (x2, _, y2) = edges[parent], edges[node]
        middle = (x1 + x2) / 2
        d.curve(f"M{x1:g} {y1:g} C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}")


def mask(example: Example) -> Drawing:
    """Which rows each row sees, and the int32 word that says so."""
    rows, size, left, top = len(example.masks), 32, 228, 62
    d = Drawing(WIDTH, top + rows * size + 20, "Mask: each row sees the context, its ancestors and itself")
    right = left + rows * size
    for x, name in ((right + 72, "bits 6 ... 0"), (right + 160, "int32"), (right + 222, "position")):
        d.text(x, top - 12, name, 12, anchor="middle")
    d.text(96 + 60, top - 12, f"cache rows 0-{example.context - 1}", 12, anchor="middle")
    _, _, ink = STYLES["accepted"]
    for row, (path, word, depth) in enumerate(
        zip(example.tree.ancestors[0], example.masks, example.depths, strict=True)
    ):
        y = top + row * size
        d.text(30, y + 21, str(row), 14, MUTED, "end", mono=True)
        d.text(40, y + 21, example.label(row), 14, INK, mono=True)
        d.text(left + row * size + size / 2, top - 28, example.label(row), 11, INK, "middle", mono=True)
        d.text(left + row * size + size / 2, top - 12, str(row), 12, MUTED, "middle", mono=True)
        d.bar(96, y + 1, 120, size - 2, "#bbf7d0")
        for column in range(rows):
            seen = path >> column & 1
            d.cell(left + column * size, y, size, "#86efac" if seen else "#ffffff")
            if seen:
                d.text(left + column * size + size / 2, y + 21, "1", 13, ink, "middle", mono=True)
        d.text(right + 72, y + 21, f"{path:0{rows}b}", 14, INK, "middle", mono=True)
        d.text(right + 160, y + 21, str(word), 14, INK, "middle", mono=True)
        d.text(right + 222, y + 21, str(example.context + depth), 14, INK, "middle", mono=True)
    return d


def forward(example: Example) -> Drawing:
    """The rows through the target: the next token at each of them, and their places in the cache."""
    d = Drawing(WIDTH, 366, "One forward: the target reads all rows at once")
    top, step = 66, 29
    for x, name in ((34, "row"), (86, "token"), (148, "position"), (208, "mask")):
        d.text(x, 34, name, 12, anchor="middle")
    d.text(450, 34, "most likely next tokens, at temperature " + str(example.recorded["temperature"]), 12)
    middle = top + 3 * step
    d.box(268, top - 20, 130, 6 * step + 40, "context")
    d.text(333, middle - 4, "target", 14, INK, "middle", bold=True)
    d.text(333, middle + 16, "one forward", 12, anchor="middle")
    for row, (inputs, depth) in enumerate(zip(example.recorded["target"], example.depths, strict=True)):
        y = top + row * step
        d.text(34, y + 5, str(row), 14, MUTED, "middle", mono=True)
        columns = ((86, example.label(row)), (148, str(example.context + depth)), (208, str(example.masks[row])))
        for x, shown in columns:
            d.text(x, y + 5, shown, 14, INK, "middle", mono=True)
        d.arrow(f"M232 {y} H264")
        d.arrow(f"M402 {y} H440")
        shares = {int(token): math.exp(log) for token, (log, _) in inputs["scores"].items()}
        likely = sorted(shares, key=lambda token: -shares[token])[:2]
        for x, token, color in zip((450, 582), likely, (INK, MUTED), strict=True):
            d.text(x, y + 5, f"{example.text(token)} {100 * shares[token]:.0f}%", 14, color, mono=True)
    cache(
        d,
        example,
        300,
        [example.label(row) for row in range(len(example.masks))],
        ["draft"] * len(example.masks),
        "root",
    )
    d.text(
        20,
        350,
        "The KV cache after it: each row's keys and values stand in the sequence's slot, after the context.",
        12,
    )
    return d


def cache(d: Drawing, example: Example, y: float, tokens: list[str], styles: list[str], first: str = "") -> list[float]:
    """A slot of the KV cache: the context and then one cell per token; the middles of the cells."""
    x, middles = 20.0, []
    d.box(x, y - CHIP_HEIGHT / 2, 140, CHIP_HEIGHT, "context")
    d.text(x + 70, y + 5, f"rows 0-{example.context - 1}", 12, anchor="middle")
    x += 146
    for index, (token, style) in enumerate(zip(tokens, styles, strict=True)):
        width = max(len(token), 2) * CHARACTER + 16
        d.box(x, y - CHIP_HEIGHT / 2, width, CHIP_HEIGHT, first if first and not index else style)
        d.text(x + width / 2, y + 5, token, 14, STYLES[style][2], "middle", mono=True)
        d.text(x + width / 2, y + 29, str(example.context + index), 11, MUTED, "middle", mono=True)
        middles.append(x + width / 2)
        x += width + 6
    return middles


def verify(example: Example) -> Drawing:
    """The walk: at each visited node, the token of the largest sum of log-probability and noise."""
    line, header = 22, 46
    height = len(next(iter(example.recorded["target"]))["scores"]) * line + 26
    d = Drawing(
        WIDTH, header + height * len(example.verdict.path), "Walk: follow the tokens that the target itself chooses"
    )
    columns = {"log p": 330, "+ noise g": 410, "= sum": 490}
    d.text(20, 28, "node, output position", 12)
    d.text(190, 28, "next token", 12)
    for name, x in columns.items():
        d.text(x, 28, name, 12, anchor="end")
    d.text(545, 28, "chosen token", 12)
    for index, (row, token) in enumerate(zip(example.verdict.path, example.verdict.tokens, strict=True)):
        top = header + height * index + 16
        d.chip(20, top, example.label(row), "accepted" if row else "root", row)
        d.text(20, top + 33, f"position {example.recorded['position'] + index}", 12)
        for number, (other, (log, noise)) in enumerate(example.recorded["target"][row]["scores"].items()):
            y, chosen = top + line * number, int(other) == token
            if chosen:
                d.bar(180, y - line / 2, 320, line, "#bbf7d0")
                d.arrow(f"M506 {y} H540")
            d.text(190, y + 5, example.text(int(other)), 13, INK, mono=True)
            for x, value in zip(columns.values(), (log, noise, log + noise), strict=True):
                d.text(x, y + 5, f"{value:.2f}".replace("-", "\u2212"), 13, INK, "end", bold=chosen, mono=True)
            if not chosen:
                continue
            if index + 1 < len(example.verdict.path):
                edge = d.chip(545, y, example.text(token), "accepted")
                d.text(edge + 10, y + 5, f"is node {example.verdict.path[index + 1]}", 12)
            else:
                edge = d.chip(545, y, example.text(token), "bonus")
                d.text(edge + 10, y + 5, "no child: bonus", 12)
    return d


def commit(example: Example) -> Drawing:
    """The cache before and after the next step moves the accepted rows together."""
    path, size = example.verdict.path, len(example.masks)
    accepted = len(path)
    d = Drawing(WIDTH, 250, "Commit: the next step moves the accepted rows together, then writes its own")
    d.text(20, 30, "After this step", 13, INK, bold=True)
    styles = ["accepted" if row in path else "rejected" for row in range(size)]
    before = cache(d, example, 64, [example.label(row) for row in range(size)], styles)
    d.text(20, 142, "In the next step", 13, INK, bold=True)
    following = [example.text(token) for token in example.recorded["next_step"]["input_ids"]]
    tokens = [*(example.label(row) for row in path), *following]
    kinds = [*["accepted"] * accepted, "bonus", *["draft"] * (len(following) - 1)]
    after = cache(d, example, 176, tokens, kinds)
    for index, row in enumerate(path):
        if index != row:
            d.arrow(f"M{before[row]:g} 98 C{before[row]:g} 140 {after[index]:g} 112 {after[index]:g} 158", "#16a34a")
    length = example.recorded["next_step"]["cache_lengths"][0]
    d.text(20, 236, f"commit_src = {path}", 13, INK, mono=True)
    d.text(300, 236, f"cache_lengths: {example.context} -> {length}", 13, INK, mono=True)
    return d


PICTURES = {
    "1-draft": draft,
    "2-tree": tree,
    "3-mask": mask,
    "4-forward": forward,
    "5-walk": verify,
    "6-commit": commit,
}


def main(
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the pictures.")] = FOLDER,
) -> None:
    """Draw the pictures of the recorded step."""
    example = Example.load()
    for name, draw in PICTURES.items():
        (output / f"{name}.svg").write_text(draw(example).svg())
    out.print(f"{output}: {', '.join(PICTURES)}")


if __name__ == "__main__":
    typer.run(main)
