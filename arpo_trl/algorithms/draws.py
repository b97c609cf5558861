"""Numbers that derive from a key, never from a global generator: the same in every process and every run."""

import json
from collections.abc import Sequence
from hashlib import blake2b


def _digest(purpose: str, seed: int, mode: str, generation: int, row: int, path: Sequence[int], step: int) -> int:
    # JSON keeps the fields apart: no two keys share an encoding, whatever their parts are.
    key = json.dumps([purpose, int(seed), mode, int(generation), int(row), [int(p) for p in path], int(step)])
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


def draw(seed: int, mode: str, generation: int, row: int, path: Sequence[int], step: int) -> float:
    """A uniform number in [0, 1) that belongs to one branch decision, the same in every process and every run.

    Args:
        seed (`int`):
            `args.seed`.
        mode (`str`):
            `"train"` or `"eval"`.
        generation (`int`):
            Counter of generation batches.
        row (`int`):
            Row of the trajectory's group in the whole batch, over all processes.
        path (`Sequence[int]`):
            Place of the trajectory in its tree.
        step (`int`):
            Tool step on that path.
    """
    return (_digest("draw", seed, mode, generation, row, path, step) >> 11) / 2**53


def request_seed(seed: int, mode: str, generation: int, row: int, path: Sequence[int], step: int) -> int:
    """A sampling seed in [0, 2**63) that belongs to one turn, independent of [`draw`] of the same key.

    Args: as in [`draw`].
    """
    return _digest("seed", seed, mode, generation, row, path, step) >> 1
