"""Draws `docs/architecture.svg`: the rooms of the package on their floors, and which of them imports which.

```shell
python scripts/make_architecture.py
```

The arrows are read from the imports; those that follow from others (a → b → c, so a may know c) are drawn thin. A room
that imports one of its own floor or of a floor above it is an error.
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path

import grimp


ROOT = Path(__file__).parents[1]

# From the top, each importing only what lies below: the rooms, what each is for, and where across the picture it stands.
FLOORS = (
    {"commands": ("what a person types", 0.5)},
    {"evaluation": ("benchmarks, pass@k", 0.18)},
    {"training": ("configs, trainers, what is TRL's", 0.62)},
    {
        "data": ("datasets to prompts", 0.16),
        "reporting": ("logs, viewer, plots, cards", 0.5),
        "demo": ("task and model of make demo", 0.84),
    },
    {"rollout": ("tree, sampler, engines, dialects", 0.45)},
    {"rewards": ("a family a file", 0.16), "tools": ("contract, runner, sandbox, search", 0.72)},
    {"algorithms": ("pure functions", 0.4)},
)
WIDTH, BOX, HEIGHT, GAP = 760, (218, 46), 96, 14
STYLE = """\
    text { font: 13px ui-monospace, monospace; text-anchor: middle; fill: #1b1f24 }
    .use { font: 11px ui-sans-serif, system-ui, sans-serif; fill: #57606a }
    rect { fill: #f6f8fa; stroke: #8c959f; rx: 6 }
    path { fill: none; stroke: #1f6feb; stroke-width: 1.5; marker-end: url(#head) }
    path.thin { stroke: #afb8c1; stroke-width: 0.8; marker-end: none }"""


def imports() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second somewhere in it.

    Raises:
        ValueError: For a room without a floor, and for an import that does not go down.
    """
    graph = grimp.build_graph("arpo_trl", cache_dir=None)
    floors = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    rooms = {module.split(".")[1] for module in graph.modules if "." in module}
    if rooms != set(floors):
        raise ValueError(f"FLOORS in {__file__} and the package differ in {sorted(rooms ^ set(floors))}.")
    pairs = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if "." not in module or "." not in imported:  # the package's public names, and its version
                continue
            pair = module.split(".")[1], imported.split(".")[1]
            if pair[0] != pair[1] and floors[pair[0]] >= floors[pair[1]]:
                raise ValueError(f"{module} imports {imported}, but {pair[1]} does not lie below {pair[0]}.")
            pairs |= {pair} - {(pair[0], pair[0])}
    return pairs


def followed(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that follow from others."""
    reach = set(pairs)
    for _ in FLOORS:
        reach |= {(a, d) for a, b in reach for c, d in pairs if b == c}
    return {(a, c) for a, c in pairs if any((a, b) in pairs and (b, c) in reach for b, _ in pairs)}


def places() -> dict[str, tuple[float, float]]:
    """Left upper corner of each room's box."""
    return {
        room: (WIDTH * across - BOX[0] / 2, GAP + number * HEIGHT)
        for number, floor in enumerate(FLOORS)
        for room, (_, across) in floor.items()
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
    thin, at = followed(pairs), places()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {GAP + len(FLOORS) * HEIGHT - 36}" '
        'role="img" aria-label="The rooms of arpo_trl and what they import">',
        f"  <style>\n{STYLE}\n  </style>",
        '  <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#1f6feb"/></marker>',
        f'  <rect width="{WIDTH}" height="{GAP + len(FLOORS) * HEIGHT - 36}" style="fill: white; stroke: none"/>',
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
    for floor in FLOORS:
        for room, (use, _) in floor.items():
            x, y = at[room]
            lines += [
                f'  <rect x="{x:.0f}" y="{y:.0f}" width="{BOX[0]}" height="{BOX[1]}"/>',
                f'  <text x="{x + BOX[0] / 2:.0f}" y="{y + 20:.0f}">{room}</text>',
                f'  <text class="use" x="{x + BOX[0] / 2:.0f}" y="{y + 37:.0f}">{escape(use)}</text>',
            ]
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    picture = ROOT / "docs" / "architecture.svg"
    picture.write_text(render(), encoding="utf-8")
    print(f"wrote {picture}")
