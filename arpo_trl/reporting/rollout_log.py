"""The rollout log: every rollout tree as a line of JSON, in one file a step and process.

Writing happens in a thread of its own. A log that cannot be written never stops a training run: it warns, once.
"""

import copy
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..rollout.tree import RolloutTree, Segment
from ..tools.contract import ToolResult


logger = logging.getLogger(__name__)

FOLDER = "rollouts"
FILE_NAME = re.compile(r"(step|eval)-(\d+)-rank(\d+)\.jsonl")
# Batches that may wait to be written; with more the rollout waits for the disk.
MAX_WAITING = 8


@dataclass(slots=True)
class ScoredRollout:
    """The trees of one generation batch of this process and what became of their rows.

    Args:
        step (`int`):
            Optimizer steps made before it was sampled.
        evaluation (`bool`):
            Whether it was sampled for evaluation.
        trees (`list[RolloutTree]`):
            One a prompt.
        rewards (`Sequence[Sequence[float]]`):
            For each row, in the order of the trees and of their slots, the reward of each reward function; NaN where
            it gave none.
        advantages (`Sequence[float]`):
            Â of each row, before any part of the algorithm changes it token by token.
        reward_names (`list[str]`):
            Names of the reward functions.
    """

    step: int
    evaluation: bool
    trees: list[RolloutTree]
    rewards: Sequence[Sequence[float]]
    advantages: Sequence[float]
    reward_names: list[str]


@dataclass(slots=True)
class _File:
    path: Path
    size: int = 0


class RolloutLog(TrainerCallback):
    """Writes rollout trees, and drops the oldest files of its process where they take too much room.

    Args:
        output_dir (`str` or `Path`):
            Where the folder `rollouts` is made.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            For the texts. It is copied, since tokenizers do not serve two threads at a time.
        max_mb (`float`, *optional*, defaults to `1024.0`):
            Most MiB of all processes together. The file that was written last is kept whatever its size.
        rank (`int`, *optional*, defaults to `0`):
            Number of this process.
        world_size (`int`, *optional*, defaults to `1`):
            Number of processes.
    """

    def __init__(
        self,
        output_dir: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        max_mb: float = 1024.0,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.folder = Path(output_dir) / FOLDER
        self.rank, self.max_bytes = rank, max_mb * 2**20 / world_size
        self._tokenizer = copy.deepcopy(tokenizer)
        self._files: list[_File] | None = None
        self._begun: set[Path] = set()
        self._warned = False
        # At exit the interpreter waits for the threads of executors, so that nothing handed over is lost.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-log")
        self._waiting: list[Future] = []

    def write(self, rollout: ScoredRollout) -> None:
        """Hands a batch over to be written. Neither the trees nor their segments may change afterwards."""
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) >= MAX_WAITING:
            self._waiting[0].result()
        self._waiting.append(self._executor.submit(self._write, rollout))

    def flush(self) -> None:
        """Returns when everything handed over is on the disk."""
        wait(self._waiting)

    def on_train_end(self, args, state, control, **kwargs):
        self.flush()

    def on_evaluate(self, args, state, control, **kwargs):
        self.flush()

    def _write(self, rollout: ScoredRollout) -> None:
        try:
            lines = "".join(json.dumps(tree, default=str) + "\n" for tree in rollout_records(rollout, self._tokenizer))
            kind = "eval" if rollout.evaluation else "step"
            self._append(self.folder / f"{kind}-{rollout.step:06d}-rank{self.rank}.jsonl", lines.encode())
            self._drop_oldest()
        except Exception as error:  # whatever it is, training goes on
            if not self._warned:
                self._warned = True
                logger.warning(
                    "A rollout could not be logged (%s: %s). Training goes on without it; make room in, or access "
                    "to, %s, or set rollout_log=False.",
                    *(type(error).__name__, error, self.folder),
                )

    def _append(self, path: Path, data: bytes) -> None:
        """A file that an earlier run left is replaced; what this run writes to one file goes one after another."""
        if self._files is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            ignore = self.folder.parent / ".gitignore"
            if not ignore.exists():  # with it the Hub leaves the log out when the folder is pushed
                ignore.write_text(f"{FOLDER}/\n", encoding="utf-8")
            mine = [
                path
                for path in self.folder.iterdir()
                if (m := FILE_NAME.fullmatch(path.name)) and int(m[3]) == self.rank
            ]
            mine.sort(key=lambda path: path.stat().st_mtime_ns)
            self._files = [_File(path, path.stat().st_size) for path in mine]
        with path.open("ab" if path in self._begun else "wb") as file:
            file.write(data)
        self._begun.add(path)
        self._files = [file for file in self._files if file.path != path]
        self._files.append(_File(path, path.stat().st_size))

    def _drop_oldest(self) -> None:
        assert self._files is not None  # listed before something is written
        while len(self._files) > 1 and sum(file.size for file in self._files) > self.max_bytes:
            self._files.pop(0).path.unlink(missing_ok=True)


def rollout_records(rollout: ScoredRollout, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """The trees of a batch as they are logged, see [`read_rollouts`]."""
    scores = iter(zip(rollout.rewards, rollout.advantages, strict=True))
    for index, tree in enumerate(rollout.trees):
        number = {id(segment): i for i, segment in enumerate(tree.segments())}
        first_prompt = tree.prompt_ids[0]
        rows = []
        for trajectory in tree.trajectories:
            rewards, advantage = next(scores)
            row = {
                "slot": trajectory.slot,
                "path": trajectory.name,
                "parent": trajectory.parent.slot if trajectory.parent is not None else None,
                "can_fork": trajectory.can_fork,
                "tail": number[id(trajectory.tail)] if trajectory.tail is not None else None,
                "tokens": trajectory.length,
                "tool_turns": trajectory.turns,
                "finish_reason": trajectory.finish_reason,
                "rewards": {
                    name: None if math.isnan(reward) else round(reward, 6)
                    for name, reward in zip(rollout.reward_names, rewards, strict=True)
                },
                "advantage": round(advantage, 6),
            }
            if trajectory.error is not None:
                row["error"] = trajectory.error
            if tree.prompt_ids[trajectory.source] != first_prompt:
                row["prompt"] = tokenizer.decode(tree.prompt_ids[trajectory.source])
            rows.append(row)
        yield {
            "step": rollout.step,
            "evaluation": rollout.evaluation,
            "tree": index,
            "prompt": tokenizer.decode(first_prompt),
            "rows": rows,
            "segments": [_segment_record(segment, number, tokenizer) for segment in tree.segments()],
            "decisions": tree.decisions,
        }


def _segment_record(segment: Segment, number: dict[int, int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    ids = segment.ids.tolist()
    record: dict[str, Any] = {
        "id": number[id(segment)],
        "parent": number[id(segment.parent)] if segment.parent is not None else None,
        "sampled": segment.sampled,
        "ids": ids,
        "text": tokenizer.decode(ids),
    }
    if segment.sampled:
        record["logprobs"] = [round(value, 4) for value in segment.logprobs]
        record["entropies"] = [round(value, 4) for value in segment.entropies]
        record["watched"] = token_texts(tokenizer, ids[: len(segment.entropies)])
    else:
        record["results"] = [_result_record(result) for result in segment.results]
    return record


def _result_record(result: ToolResult) -> dict[str, Any]:
    return {
        "name": result.name,
        "content": result.content,
        "failure": result.failure,
        "latency_s": round(result.latency_s, 4),
        "cached": result.cached,
    }


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """What each token adds to the text, `""` for tokens that leave a character incomplete."""
    texts, done = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            texts.append("")
        else:
            texts.append(text[len(done) :])
            done = text
    return texts


def read_rollouts(
    folder: str | Path, step: int | None = None, evaluation: bool | None = None
) -> Iterator[dict[str, Any]]:
    """
    Reads the rollout log back, tree by tree, ordered by step and process.

    Args:
        folder (`str` or `Path`):
            A run's `output_dir`, its folder `rollouts`, or one of the files.
        step (`int`, *optional*):
            Only what was sampled after so many optimizer steps.
        evaluation (`bool`, *optional*):
            Only evaluation (`True`) or only training (`False`).

    Yields:
        `dict`: One rollout tree:

            - `step` (`int`), `evaluation` (`bool`), `rank` (`int`, the process) and `tree` (`int`, which of its
              batch);
            - `prompt` (`str`): what the model saw, special tokens included;
            - `rows` (`list[dict]`): `slot`, `path` (its place in words, `"3.1:0"` is the first fork of root 3 after
              tool step 1), `parent` (slot of the row it was forked from, or `None`), `can_fork`, `tail` (id of its
              last segment), `tokens`, `tool_turns`, `finish_reason`, `rewards` (by reward function, `None` where it
              gave none), `advantage`; `error` and `prompt` where it has its own;
            - `segments` (`list[dict]`), each once, parents first: `id`, `parent`, `sampled`, `ids`, `text`; where
              sampled `logprobs` and `entropies` in nats (the latter of the first tokens only, as far as they were
              watched) and `watched`, the texts of those tokens; else `results`: `name`, `content`, `failure`,
              `latency_s`, `cached`;
            - `decisions` (`list[dict]`): `slot`, `step`, `delta_entropy`, `score` (P before it is clipped),
              `consecutive`, `wanted`, `children` (slots of the forks).

    Raises:
        FileNotFoundError: If there is no log.
    """
    for path, kind, number, rank in log_files(folder):
        if (step is None or number == step) and (evaluation is None or (kind == "eval") == evaluation):
            with path.open(encoding="utf-8") as file:
                for line in file:
                    if line.endswith("\n"):  # else the process was killed while it wrote
                        yield {"rank": rank, **json.loads(line)}


def log_files(folder: str | Path) -> list[tuple[Path, str, int, int]]:
    """The files of a rollout log: path, `"step"` or `"eval"`, step and process, in the order of the latter two."""
    folder = Path(folder)
    if folder.is_file():
        paths = [folder]
    else:
        inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        paths = list(inside.iterdir()) if inside.is_dir() else []
    found = [(path, m[1], int(m[2]), int(m[3])) for path in paths if (m := FILE_NAME.fullmatch(path.name))]
    if not found:
        raise FileNotFoundError(f"There is no rollout log in {folder}. Train with rollout_log=True.")
    # Evaluation after n steps precedes the rollout of the next.
    return sorted(found, key=lambda file: (file[2], file[1] == "step", file[3]))
