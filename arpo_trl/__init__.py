"""ARPO and AEPO for TRL: reinforcement learning of tool-using language models whose rollouts fork."""

import importlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .training.aepo_trainer import AEPOTrainer
    from .training.arpo_trainer import ARPOTrainer
    from .training.config import AEPOConfig, ARPOConfig

__version__ = "0.1.0"
__all__ = ["AEPOConfig", "AEPOTrainer", "ARPOConfig", "ARPOTrainer"]

_HOMES = {
    "ARPOConfig": "training.config",
    "AEPOConfig": "training.config",
    "ARPOTrainer": "training.arpo_trainer",
    "AEPOTrainer": "training.aepo_trainer",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'arpo_trl' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
