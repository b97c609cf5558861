"""Attention over a pack: every node attends to its ancestors and to itself."""

import os
import shutil
from collections.abc import Callable

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._triton import has_triton
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward


logger = get_logger(__name__)

# Neighbouring segments are attended in one call while they have at most this many tokens: more spares calls, less
# spares products that the mask throws away.
MERGE_TOKENS_CPU = 64
MERGE_TOKENS_ACCELERATOR = 2048
# On CUDA, packs from this size on use FlexAttention, which skips the empty blocks of the mask.
FLEX_MIN_TOKENS = 2048
# Bytes of shared memory that torch's choice of kernels takes for granted.
AMPLE_SHARED_MEMORY = 160 * 1024


def is_ancestor(query: torch.Tensor, key: torch.Tensor, subtree_end: torch.Tensor) -> torch.Tensor:
    """
    Whether node `key` is an ancestor of node `query` or the same node, elementwise. It is the one rule of attention in
    a pack.

    Args:
        query (`torch.Tensor`):
            Nodes that attend.
        key (`torch.Tensor`):
            Nodes that are attended to, of a shape that broadcasts with that of `query`.
        subtree_end (`torch.Tensor` of shape `(S,)`):
            One past the last descendant of each node.

    Returns:
        `torch.Tensor`: Booleans.
    """
    return (key <= query) & (query < subtree_end[key])


class SegmentedAttention:
    """
    Attention over a pack through `scaled_dot_product_attention`, with boolean masks.

    The pack is cut at its forks into segments. Each segment, or run of small ones, attends to those it descends from
    and to no others, which leaves out most of what a mask over the whole pack would throw away.

    Args:
        subtree_end (`np.ndarray` of shape `(S,)`):
            One past the last descendant of each node.
        device (`torch.device`):
            Where the masks are needed.
        merge_tokens (`int`):
            Neighbouring segments are attended together while they have at most this many tokens.
    """

    def __init__(self, subtree_end: np.ndarray, device: torch.device, merge_tokens: int):
        # Along a segment the descendants end at the same node
        starts = np.concatenate([[0], np.flatnonzero(np.diff(subtree_end)) + 1])
        bounds = np.append(starts, len(subtree_end))
        ends = torch.from_numpy(subtree_end).to(device)
        nodes = torch.arange(len(subtree_end), device=device)
        segment_nodes = nodes.split(np.diff(bounds).tolist())

        self.segment_lengths = [len(segment) for segment in segment_nodes]
        self.query_lengths, self.key_segments, self.masks = [], [], []
        first = 0
        while first < len(starts):
            last = first + 1
            while last < len(starts) and bounds[last + 1] - bounds[first] <= merge_tokens:
                last += 1
            queries = nodes[bounds[first] : bounds[last]]
            segments = np.flatnonzero(subtree_end[starts[:last]] > bounds[first]).tolist()
            self.query_lengths.append(len(queries))
            self.key_segments.append(segments)
            if len(segments) == 1:
                # A root on its own: plain causal attention, for which kernels need no mask
                self.masks.append(None)
            else:
                keys = torch.cat([segment_nodes[segment] for segment in segments])
                self.masks.append(is_ancestor(queries[:, None], keys, ends)[None, None])
            first = last

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        queries = query.split(self.query_lengths, dim=2)
        keys, values = key.split(self.segment_lengths, dim=2), value.split(self.segment_lengths, dim=2)
        outputs = []
        for block_query, segments, mask in zip(queries, self.key_segments, self.masks, strict=True):
            # A root's keys are not copied
            block_key = torch.cat([keys[s] for s in segments], dim=2) if mask is not None else keys[segments[0]]
            block_value = torch.cat([values[s] for s in segments], dim=2) if mask is not None else values[segments[0]]
            outputs.append(
                sdpa_attention_forward(module, block_query, block_key, block_value, mask, scaling=scaling)[0]
            )
        return torch.cat(outputs, dim=1)


class BlockSparseAttention:
    """
    Attention over a pack through FlexAttention.

    Args:
        subtree_end (`np.ndarray` of shape `(S,)`):
            One past the last descendant of each node.
        device (`torch.device`):
            Where the block mask is needed.
    """

    def __init__(self, subtree_end: np.ndarray, device: torch.device):
        ends = torch.from_numpy(subtree_end).to(device)

        def mask_mod(batch, head, query, key):
            return is_ancestor(query, key, ends)

        self.kernel_options = kernel_options(device) if device.type == "cuda" else None
        # Compiled, it does not hold the mask of all pairs of nodes in memory
        self.block_mask = create_block_mask(
            mask_mod, None, None, len(ends), len(ends), device=device, _compile=device.type == "cuda"
        )

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        # Under autocast, rotary embeddings leave queries and keys in float32: FlexAttention wants one type.
        query, key = query.to(value.dtype), key.to(value.dtype)
        return flex_attention_forward(
            module, query, key, value, self.block_mask, scaling=scaling, kernel_options=self.kernel_options
        )[0]


def kernel_options(device: torch.device) -> dict[str, int] | None:
    """
    Options with which FlexAttention's kernels fit a GPU of little shared memory, such as the RTX 4090.

    Torch takes the forward kernel of an A100, which has 163 KiB a block, for compute capability 8.6 and 8.9, too, which
    have 99: at a head size of 128 its three stages do not fit (pytorch/pytorch#133254).

    Args:
        device (`torch.device`):
            A CUDA device.
    """
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return {"fwd_num_stages": 2} if shared_memory < AMPLE_SHARED_MEMORY else None


def why_not_compiled() -> str | None:
    """
    Why torch cannot compile FlexAttention here, `None` if it can. Uncompiled, it holds the scores of all pairs of nodes.
    """
    if torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is switched off (TORCH_COMPILE_DISABLE)"
    if not has_triton():
        return "Triton is not installed or does not know this GPU"
    compiler = os.environ.get("CC") or "gcc or clang"
    if not any(shutil.which(name) for name in compiler.split(" or ")):
        return f"Triton finds no C compiler ({compiler})"
    return None


def prefix_tree_attention(subtree_end: np.ndarray, device: torch.device) -> SegmentedAttention | BlockSparseAttention:
    """
    Attention for a pack: FlexAttention for a large one on CUDA, where it can be compiled, and
    `scaled_dot_product_attention` otherwise.

    Args:
        subtree_end (`np.ndarray` of shape `(S,)`):
            One past the last descendant of each node.
        device (`torch.device`):
            Where the model runs.

    Returns:
        [`SegmentedAttention`] or [`BlockSparseAttention`]: A function of `(module, query, key, value, scaling)`, with
        `query`, `key` and `value` of shape `(1, heads, S, head_dim)`, that returns `(1, S, heads, head_dim)`.
    """
    if device.type == "cuda" and len(subtree_end) >= FLEX_MIN_TOKENS:
        reason = why_not_compiled()
        if reason is None:
            return BlockSparseAttention(subtree_end, device)
        logger.warning_once(f"Large packs do without FlexAttention, which makes the update slower: {reason}.")
    return SegmentedAttention(
        subtree_end, device, MERGE_TOKENS_CPU if device.type == "cpu" else MERGE_TOKENS_ACCELERATOR
    )


class PackAwareAttention:
    """
    A transformers attention function that also takes packs.

    Given `prefix_tree`, a keyword argument of the model's forward that transformers hands down to every attention
    layer, it is the pack's attention. Without, it is the function it wraps.

    Args:
        function (`Callable`):
            Attention function as transformers registers them.
    """

    # Options of attention functions that the attention of a pack does not have
    UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, module, query, key, value, attention_mask, scaling=None, prefix_tree=None, **kwargs):
        if prefix_tree is None:
            return self.function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        unsupported = [name for name in self.UNSUPPORTED if kwargs.get(name) is not None]
        if unsupported:
            raise ValueError(f"{type(module).__name__} sets {', '.join(unsupported)}: set prefix_sharing to 'off'.")
        return prefix_tree(module, query, key, value, scaling), None


def make_pack_aware(model: PreTrainedModel) -> None:
    """
    Let the attention implementation of a model take packs. Calls without a pack stay what they were.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model whose implementation is one of transformers' `AttentionInterface`.
    """
    implementation = model.config._attn_implementation
    function = AttentionInterface()[implementation]
    if not isinstance(function, PackAwareAttention):
        AttentionInterface.register(implementation, PackAwareAttention(function))
