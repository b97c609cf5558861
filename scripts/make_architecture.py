"""Draws `docs/architecture.svg`: the rooms of the package on their floors, and which of them imports which.

```shell
python scripts/make_architecture.py
```

The floors are those of the contract in `setup.cfg`, which `make lint` checks; the arrows are read from the imports.
Arrows that follow from others (a → b → c, so a may know c) are drawn thin.
"""

import configparser
from collections.abc import Iterable
from html import escape
from pathlib import Path

import grimp


ROOT = Path(__file__).parents[1]

# What each room is for, and where across the picture it stands.
ROOMS = {
    "commands": ("what a person types", 0.5),
    "evaluation": ("benchmarks, pass@k", 0.18),
    "training": ("configs, trainers, what is TRL's", 0.62),
    "data": ("datasets to prompts", 0.16),
    "reporting": ("logs, viewer, plots, cards", 0.5),
    "demo": ("task and model of make demo", 0.84),
    "rollout": ("tree, sampler, engines, dialects", 0.45),
    "rewards": ("a family a file", 0.16),
    "tools": ("contract, runner, sandbox, search", 0.72),
    "algorithms": ("pure functions", 0.4),
    "extensions": ("parts by name or dotted path", 0.8),
}
WIDTH, BOX, HEIGHT, GAP = 760, (218, 46), 96, 14
STYLE = """\
    text { font: 13px ui-monospace, monospace; text-anchor: middle; fill: #1b1f24 }
    .use { font: 11px ui-sans-serif, system-ui, sans-serif; fill: #57606a }
    rect { fill: #f6f8fa; stroke: #8c959f; rx: 6 }
    path { fill: none; stroke: #1f6feb; stroke-width: 1.5; marker-end: url(#head) }
    path.thin { stroke: #afb8c1; stroke-width: 0.8; marker-end: none }"""


def floors() -> list[list[str]]:
    """The rooms of each floor, from the top.

    Raises:
        ValueError: If `ROOMS` does not have exactly these.
    """
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["importlinter:contract:floors"]["layers"].split("\n")
    found = [[room.strip() for room in line.split("|")] for line in lines if line.strip()]
    if different := {room for floor in found for room in floor} ^ set(ROOMS):
        raise ValueError(f"ROOMS in {__file__} and the floors in setup.cfg differ in {sorted(different)}.")
    return found


def imports() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second somewhere in it."""
    graph = grimp.build_graph("arpo_trl", cache_dir=None)
    pairs = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if "." in module and "." in imported:  # not the package's public names and version
                pairs.add((module.split(".")[1], imported.split(".")[1]))
    return {(a, b) for a, b in pairs if a != b}


def followed(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that follow from others."""
    reach = set(pairs)
    for _ in ROOMS:
        reach |= {(a, d) for a, b in reach for c, d in pairs if b == c}
    return {(a, c) for a, c in pairs if any((a, b) in pairs and (b, c) in reach for b, _ in pairs)}


def places() -> dict[str, tuple[float, float]]:
    """Left upper corner of each room's box."""
    return {
        room: (WIDTH * ROOMS[room][1] - BOX[0] / 2, GAP + number * HEIGHT)
        for number, floor in enumerate(floors())
        for room in floor
    }


def ports(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, float, float, float]]:
    """Where each arrow leaves and arrives: spread along the edges of the boxes, in the order of where it goes."""
    at, ends = places(), {}
    for pair in pairs:
        ends[pair] = [0.0, at[pair[0]][1] + BOX[1], 0.0, at[pair[1]][1]]
    for end, other in ((0, 1), (1, 0)):
        for room in at:
            own = sorted((pair for pair in ends if pair[end] == room), key=lambda pair: (at[pair[other]][0], pair))
            for index, pair in enumerate(own):
                ends[pair][2 * end] = at[room][0] + BOX[0] * (index + 1) / (len(own) + 1)
    return {pair: tuple(end) for pair, end in ends.items()}


def render() -> str:
    """The picture, as SVG."""
    pairs = imports()
    thin, at, height = followed(pairs), places(), GAP + len(floors()) * HEIGHT - 36
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'role="img" aria-label="The rooms of arpo_trl and what they import">',
        f"  <style>\n{STYLE}\n  </style>",
        '  <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#1f6feb"/></marker>',
        f'  <rect width="{WIDTH}" height="{height}" style="fill: white; stroke: none"/>',
    ]
    ends = ports(pairs)
    for pair in sorted(pairs, key=lambda pair: (pair not in thin, pair)):
        x1, y1, x2, y2 = ends[pair]
        bend = (y2 - y1) / 2
        kind = ' class="thin"' if pair in thin else ""
        lines.append(
            f'  <path{kind} d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + bend:.0f} {x2:.0f},{y2 - bend:.0f} '
            f'{x2:.0f},{y2:.0f}"><title>{pair[0]} imports {pair[1]}</title></path>'
        )
    for room, (x, y) in at.items():
        lines += [
            f'  <rect x="{x:.0f}" y="{y:.0f}" width="{BOX[0]}" height="{BOX[1]}"/>',
            f'  <text x="{x + BOX[0] / 2:.0f}" y="{y + 20:.0f}">{room}</text>',
            f'  <text class="use" x="{x + BOX[0] / 2:.0f}" y="{y + 37:.0f}">{escape(ROOMS[room][0])}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    picture = ROOT / "docs" / "architecture.svg"
    picture.write_text(render(), encoding="utf-8")
    print(f"wrote {picture}")
