"""How rows become a loss."""

from dataclasses import dataclass

from .described import described


@described
@dataclass
class UpdateArguments:
    r"""
    How rows become a loss. Part of [`ARPOConfig`].

    Args:
        attribution (`str`, *optional*, defaults to `"soft"`):
            `"soft"`: every row's tokens get the row's advantage. `"hard"`: a token shared by d rows gets the mean of
            their d advantages. Or the dotted path of a credit rule of one's own.
        prefix_sharing (`str`, *optional*, defaults to `"auto"`):
            Whether the update computes tokens that rows of a micro-batch share only once: `"auto"` where that is
            exact, `"on"` (an error where it is not), `"off"`.
        max_packed_tokens (`int`, *optional*, defaults to `16384`):
            Most distinct tokens in one forward pass with prefix sharing.
        token_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether the update goes back through the model after each such pass, so that `max_packed_tokens`, not
            `per_device_train_batch_size`, bounds its memory. Needs prefix sharing and `loss_type="dapo"`.
    """

    attribution: str = "soft"
    prefix_sharing: str = "auto"
    max_packed_tokens: int = 16384
    token_micro_batches: bool = False
