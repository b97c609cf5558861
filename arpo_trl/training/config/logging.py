"""What is written down."""

from dataclasses import dataclass

from .described import described


@described
@dataclass
class LoggingArguments:
    r"""
    What is written down. Part of [`ARPOConfig`].

    Args:
        rollout_log (`bool`, *optional*, defaults to `False`):
            Whether to write every rollout tree to `output_dir/rollouts`, one JSONL file a step.
        rollout_log_max_mb (`float`, *optional*, defaults to `1024.0`):
            Size in MiB at which the rollout log drops its oldest steps.
    """

    rollout_log: bool = False
    rollout_log_max_mb: float = 1024.0
