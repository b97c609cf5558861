"""The engine that a trainer samples with."""

from collections.abc import Callable, Iterable
from typing import Any

from ..extensions import resolve
from ..rollout.engines.protocol import Engine
from ..rollout.vision import placeholder_ids


def vllm_engine(trainer: Any, stop_token_ids: Iterable[int]) -> Engine:
    """Over the trainer's own vLLM, in this process or a server."""
    return trainer.vllm_generation.make_engine(stop_token_ids, placeholder_ids(trainer))


# Each is called with the trainer and the tokens that end a turn.
ENGINES: dict[str, str | Callable[[Any, Iterable[int]], Engine]] = {
    "transformers": "arpo_trl.rollout.engines.transformers_engine.engine_for_trainer",
    "vllm": vllm_engine,
}


def make_engine(trainer: Any, stop_token_ids: Iterable[int]) -> Engine:
    """
    The engine that `args.engine` names; without one vLLM's where `use_vllm` is set, else transformers'.

    Raises:
        `ValueError`: there is no such engine, or it cannot serve this trainer.
    """
    name = trainer.args.engine or ("vllm" if trainer.use_vllm else "transformers")
    return resolve("engine", name, ENGINES)(trainer, stop_token_ids)
