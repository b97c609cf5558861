"""What a recipe may say beyond TRL's `GRPOConfig`, a file a topic; each docstring is the description of its options."""

from .aepo import AEPOConfig
from .arpo import ARPOConfig
from .checks import check_group_sizes


__all__ = ["AEPOConfig", "ARPOConfig", "check_group_sizes"]
