"""Which advantage a token of a tree gets (ARPO, "Hard Advantage Estimation")."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def token_identities(rows: Sequence[Sequence[tuple[int, int]]], length: int) -> torch.Tensor:
    """Numbers tokens so that two positions have one number exactly if they are one token of the tree.

    Args:
        rows (`Sequence[Sequence[tuple[int, int]]]`):
            For each row its path: (segment id, tokens in it) from the first segment to the last. One segment id means
            one segment, whose length is the same in all rows.
        length (`int`):
            T. What is longer is cut off.

    Returns:
        `torch.Tensor` of shape `(B, T)`, dtype `int64`: Numbers from 0 on; -1 for padding.
    """
    first: dict[int, int] = {}
    free = 0
    identities = torch.full((len(rows), length), -1)
    for row, path in enumerate(rows):
        start = 0
        for segment, size in path:
            if segment not in first:
                first[segment] = free
                free += size
            end = min(start + size, length)
            identities[row, start:end] = torch.arange(first[segment], first[segment] + end - start)
            start = end
    return identities


def hard_attribution(
    advantages: torch.Tensor, identities: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """A token shared by d rows gets the mean of their d advantages (ARPO, "Hard Advantage Estimation").

    Whatever the depth of forks. The sum of advantages over all tokens of all rows stays what it was. The released code
    has soft attribution only, which gives each row its own Â.

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Â of each row. A group lies in one process, so the rows of this process suffice.
        identities (`torch.Tensor` of shape `(B, T)`):
            From [`token_identities`], on the device of `advantages`.
        valid (`torch.Tensor` of shape `(B,)`, *optional*):
            Rows that take part, all by default. The others get 0 and do not enter a mean.

    Returns:
        `torch.Tensor` of shape `(B, T)`: 0 where there is no token.
    """
    present = identities >= 0
    if valid is not None:
        present = present & valid.bool().unsqueeze(1)
    _, token, owners = torch.unique(identities[present], return_inverse=True, return_counts=True)
    spread = advantages.unsqueeze(1).expand(identities.shape)[present]
    sums = spread.new_zeros(owners.shape).index_add(0, token, spread)
    attributed = advantages.new_zeros(identities.shape)
    attributed[present] = (sums / owners)[token]
    return attributed


@dataclass(frozen=True, slots=True)
class CreditRows:
    """What a credit rule sees of the rows of this process; their groups are whole.

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Â of each row.
        identities (`torch.Tensor` of shape `(B, T)`):
            From [`token_identities`], on the device of `advantages`.
        valid (`torch.Tensor` of shape `(B,)`):
            Rows that have a reward and tokens to train on.
    """

    advantages: torch.Tensor
    identities: torch.Tensor
    valid: torch.Tensor


def soft(rows: CreditRows) -> torch.Tensor:
    """Each row's own Â for all its tokens (ARPO, "Soft Advantage Estimation"), of shape (B,)."""
    return rows.advantages


def hard(rows: CreditRows) -> torch.Tensor:
    """[`hard_attribution`], of shape (B, T)."""
    return hard_attribution(rows.advantages, rows.identities, rows.valid)


CREDIT_RULES: dict[str, Callable[[CreditRows], torch.Tensor]] = {"soft": soft, "hard": hard}
