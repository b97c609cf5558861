"""Training curves and pass@k curves from the files that runs leave, as PNG and SVG."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


# Panels of the training figure: title, and the metrics that are drawn in it where a run has them.
PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("reward", "eval_reward"),
    "entropy (nats a token)": ("entropy", "eval_entropy"),
    "tool calls a row": ("tools/call_frequency", "eval_tools/call_frequency"),
    "forks a prompt": ("rollout/forks",),
    "ΔH after tool results": ("rollout/delta_entropy",),
    "tokens a row": ("completions/mean_length",),
}


def read_history(path: str | Path) -> list[dict[str, Any]]:
    """
    The log of a training run.

    Args:
        path (`str` or `Path`):
            An output folder, with `trainer_state.json` in it or in its newest checkpoint, or the file itself.

    Raises:
        `FileNotFoundError`: there is none.
    """
    path = Path(path)
    if path.is_dir():
        checkpoints = [folder for folder in path.glob("checkpoint-*") if folder.name.rpartition("-")[2].isdigit()]
        newest_first = sorted(checkpoints, key=lambda folder: -int(folder.name.rpartition("-")[2]))
        files = [folder / "trainer_state.json" for folder in (path, *newest_first)]
        path = next((file for file in files if file.exists()), files[0])
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}; name the output folder of a training run.")
    state = json.loads(path.read_text(encoding="utf-8"))
    return state["log_history"] if isinstance(state, dict) else state


def curve(history: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric in a log, where it was logged."""
    entries = [entry for entry in history if isinstance(entry.get(metric), int | float)]
    return [entry["step"] for entry in entries], [float(entry[metric]) for entry in entries]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values up to each one."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - window) : i + 1]]]


def plot_training(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    output: str | Path,
    metrics: Sequence[str] = (),
    window: int = 1,
) -> list[Path]:
    """
    Draws the curves of one or several training runs.

    Args:
        runs (`Mapping[str, Sequence[Mapping]]`):
            Logs by label, from [`read_history`].
        output (`str` or `Path`):
            Path without suffix; `.png` and `.svg` are written.
        metrics (`Sequence[str]`, *optional*, defaults to `()`):
            Logged names to draw, a panel each, instead of `PANELS`.
        window (`int`, *optional*, defaults to `1`):
            Values that are averaged to one point; the raw curve stays behind it.

    Returns:
        `list[Path]`: the files.

    Raises:
        `ValueError`: no run has any of the metrics.
    """
    logged = {key for history in runs.values() for entry in history for key in entry}
    panels = {name: (name,) for name in metrics} or PANELS
    panels = {title: names for title, names in panels.items() if logged.intersection(names)}
    if not panels:
        raise ValueError(f"The logs have none of these metrics; they have {', '.join(sorted(logged)) or 'nothing'}.")
    plt = _pyplot()
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.0 * rows), squeeze=False)
    colors = {label: f"C{number}" for number, label in enumerate(runs)}
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=False):
        for label, history in runs.items():
            for name in names:
                steps, values = curve(history, name)
                if not steps:
                    continue
                style = {"color": colors[label], "linestyle": "--" if name.startswith("eval_") else "-"}
                if window > 1:
                    axis.plot(steps, values, alpha=0.25, **style)
                marker = "o" if len(steps) < 15 else None
                suffix = " (evaluation)" if name.startswith("eval_") else ""
                axis.plot(steps, smooth(values, window), marker=marker, markersize=3, label=label + suffix, **style)
        axis.set(title=title, xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if len(axis.lines) > 1:
            axis.legend(fontsize="small")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    return _save(figure, output)


def plot_pass_at_k(runs: Mapping[str, Sequence[Mapping[str, Any]]], output: str | Path) -> list[Path]:
    """
    Draws pass@k, and majority@k dashed, a panel a benchmark.

    Args:
        runs (`Mapping[str, Sequence[Mapping]]`):
            By label the content of `summary.json` of evaluation runs.
        output (`str` or `Path`):
            Path without suffix; `.png` and `.svg` are written.

    Returns:
        `list[Path]`: the files.

    Raises:
        `ValueError`: there is no benchmark in them.
    """
    names = list(dict.fromkeys(summary["benchmark"] for summaries in runs.values() for summary in summaries))
    if not names:
        raise ValueError("The summaries hold no benchmark; evaluate one first.")
    plt = _pyplot()
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False, sharey=True)
    for axis, name in zip(axes.flat, names, strict=False):
        for number, (label, summaries) in enumerate(runs.items()):
            summary = next((summary for summary in summaries if summary["benchmark"] == name), None)
            if summary is None:
                continue
            for key, style in (("pass@k", "-o"), ("majority@k", "--s")):
                points = sorted((int(k), value) for k, value in summary[key].items() if value is not None)
                axis.plot(*zip(*points, strict=True), style, color=f"C{number}", markersize=3, label=f"{label} {key}")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda k, _: f"{k:g}")
        axis.set(title=name, xlabel="k", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    axes[0, 0].legend(fontsize="small")
    return _save(figure, output)


def _pyplot():
    """Matplotlib is an extra, and draws into files without a display."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Plots need matplotlib; run `pip install arpo-trl[reporting]`.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, output: str | Path) -> list[Path]:
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    files = [output.with_name(output.name + suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    _pyplot().close(figure)
    return files
