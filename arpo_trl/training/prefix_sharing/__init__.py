"""
Prefix sharing: one forward over the distinct tokens of a batch.

The rows of a GRPO group share their prompt, and the rows of a fork tree share long stretches of their conversation.
[`PrefixSharingMixin`] merges the rows of a batch into prefix trees (`packing`), runs the model once over the nodes
(`attention`) and scatters log-probabilities and entropies back to rows (`trainer`). It stands behind TRL's
`_get_per_token_logps_and_entropies`, so that the old, reference and current log-probabilities and every loss use it
unchanged. [`TokenMicroBatchMixin`] bounds the memory of an update by the tokens of a pack (`micro_batches`).
"""

from .micro_batches import TokenMicroBatchMixin
from .trainer import PrefixSharingMixin


__all__ = ["PrefixSharingMixin", "TokenMicroBatchMixin"]
