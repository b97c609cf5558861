"""Prefix sharing behind TRL's `_get_per_token_logps_and_entropies`."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from trl.extras.profiling import profiling_decorator
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from .attention import make_pack_aware, prefix_tree_attention
from .micro_batches import take_rows
from .packing import Pack, build_pack, common_prefix_length, split_rows


logger = get_logger(__name__)


def get_base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model under a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_not_exact(model: nn.Module) -> str | None:
    """
    Why prefix sharing is not exact for a model.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Causal language model, unwrapped.

    Returns:
        `str` or `None`: The reason, `None` if sharing is exact.
    """
    base_model = get_base_model(model)
    config = base_model.config
    name = config.model_type
    if config.get_text_config() is not config:
        return f"{name} is multimodal"
    if base_model._is_stateful:
        return f"{name} has recurrent layers"
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None and getattr(config, "sliding_window", None) is not None:
        return f"{name} has sliding-window attention"
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        return f"{name} has {', '.join(sorted(set(layer_types) - {'full_attention'}))} layers"
    if not getattr(config, "is_causal", True):
        return f"{name} is not causal"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return f"{name} has no rotary position embeddings"
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"{rope['rope_type']} rotary embeddings depend on the longest row of a batch"
    implementation = config._attn_implementation
    if not base_model._supports_attention_backend or implementation not in AttentionInterface():
        return f"{name} with attn_implementation={implementation!r} takes no attention function, try 'sdpa'"
    if getattr(config, "output_router_logits", False):
        return "the MoE load-balancing loss counts the tokens of every row"
    noise = getattr(config, "attention_dropout", 0.0) or getattr(config, "router_jitter_noise", 0.0)
    if noise or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "dropout is active, see `disable_dropout` and LoRA's `lora_dropout`"
    if hasattr(model, "active_peft_config") and model.active_peft_config.is_prompt_learning:
        return "a prompt-learning adapter puts tokens of its own before each row"
    return None


@contextmanager
def gather_hidden_states(backbone: nn.Module, nodes: torch.Tensor) -> Iterator[None]:
    """
    Within this context `backbone` returns the last hidden states of `nodes` only, in their order.

    TRL's fused LM head scores one label a position, so that a node with several children has to occur once for each.

    Args:
        backbone (`nn.Module`):
            Model without its head.
        nodes (`torch.Tensor` of shape `(N,)`):
            Positions to return.
    """

    def select(module, args, output):
        output.last_hidden_state = output.last_hidden_state[:, nodes.to(output.last_hidden_state.device)]
        return output

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


def shuffle_groups(batch: dict[str, Any], group_size: int) -> dict[str, Any]:
    """
    Shuffle a generation batch as TRL's `shuffle_sequence_dict` does, but keep the rows of a group together.

    It draws the same permutation from the same generator. The groups take the order in which their first rows stand
    in it, the rows within a group their own order in it.

    Args:
        batch (`dict[str, Any]`):
            Tensors and lists with one element a row, groups of `group_size` rows next to each other. Zero-dimensional
            tensors and `None` stay as they are.
        group_size (`int`):
            Rows in a group.

    Returns:
        `dict[str, Any]`: The same entries, permuted in unison.
    """
    num_rows = len(next(value for value in batch.values() if value is not None))
    groups: dict[int, list[int]] = {}
    for row in torch.randperm(num_rows).tolist():
        groups.setdefault(row // group_size, []).append(row)
    return take_rows(batch, [row for rows in groups.values() for row in rows])


class PrefixSharingMixin:
    """
    Computes shared prefixes once in [`~trl.GRPOTrainer`] and its subclasses, before which it is to stand among the
    base classes.

    It reads two training arguments:

    - `prefix_sharing` (`str`): `"auto"` shares prefixes where that is exact and logs the reason where it is not, `"on"`
      raises an error there, `"off"` leaves everything to TRL.
    - `max_packed_tokens` (`int`): most tokens in one forward.

    It adds two metrics, one value a call: `prefix_sharing/token_fraction`, tokens computed over tokens of the rows
    (padding not counted), and `prefix_sharing/recomputed_tokens`, shared tokens that were computed again because a
    batch took several packs.

    Raises:
        `ValueError`: If `prefix_sharing="on"` and sharing is not exact for the model.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._prefix_sharing_enabled = self._resolve_prefix_sharing()

    def _resolve_prefix_sharing(self) -> bool:
        if self.args.prefix_sharing not in ("auto", "on", "off"):
            raise ValueError(f"prefix_sharing={self.args.prefix_sharing!r} must be 'auto', 'on' or 'off'.")
        if self.args.prefix_sharing == "off":
            return False
        models = [self.accelerator.unwrap_model(m) for m in (self.model, self.ref_model) if m is not None]
        reasons = [why_not_exact(model) for model in models]
        if self.aux_loss_enabled:
            reasons.append("the MoE load-balancing loss counts the tokens of every row")
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None and self.args.prefix_sharing == "on":
            raise ValueError(f"prefix_sharing='on' would not be exact ({reason}): set it to 'auto' or 'off'.")
        if reason is not None:
            logger.warning(f"Prefix sharing is off: {reason}.")
            return False
        for model in models:
            make_pack_aware(get_base_model(model))
        return True

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        # As in `GRPOTrainer` (TRL 1.16), except that groups are shuffled instead of rows
        if not self._prefix_sharing_enabled or not self.model.training:
            return super()._prepare_inputs(generation_batch)
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every == 0 or self._buffered_inputs is None:
            generation_batch = self._generate_and_score_completions(generation_batch)
            generation_batch = split_pixel_values_by_grid(generation_batch)
            generation_batch = shuffle_groups(generation_batch, self.num_generations)
            generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)
            self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in generation_batches]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal_inputs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        is_multimodal = any(value is not None for value in multimodal_inputs.values())
        aux_loss = None
        if self._prefix_sharing_enabled and not compute_aux_loss and not is_multimodal:
            logps, entropies = self._get_packed_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, compute_entropy
            )
        else:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **multimodal_inputs,
            )
        if torch.finfo(logps.dtype).bits < 32:
            raise RuntimeError(
                f"Log-probabilities are {logps.dtype}, too coarse for ratios: something casts what the model returns, "
                "such as the output type of a mixed-precision policy. Leave that type out."
            )
        return logps, entropies, aux_loss

    @profiling_decorator
    def _get_packed_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        compute_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Score the last `logits_to_keep` tokens of each row, computing every distinct token once.

        Args:
            model (`nn.Module`):
                Model with TRL's fused LM head, wrapped or not.
            input_ids (`torch.Tensor` of shape `(batch, length)`):
                Left-padded prompts followed by right-padded completions.
            attention_mask (`torch.Tensor` of shape `(batch, length)`):
                1 for a token, 0 for padding.
            logits_to_keep (`int`):
                Number of columns to score.
            compute_entropy (`bool`):
                Whether to return entropies as well.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None]`: Log-probabilities and entropies in nats, of shape `(batch,
            logits_to_keep)`, 0 at padding. Without any prompt column there is one column less, as in TRL.
        """
        device = input_ids.device
        ids, mask = input_ids.cpu().numpy(), attention_mask.bool().cpu().numpy()
        sequences = [row_ids[row_mask] for row_ids, row_mask in zip(ids, mask, strict=True)]
        scored_mask = mask[:, 1:][:, -logits_to_keep:]
        # The first token of a row has nothing to be predicted from, even where it stands in the completion
        num_targets = [min(row.sum(), len(seq) - 1) for row, seq in zip(scored_mask, sequences, strict=True)]

        log_probs, entropies = [], []
        # Where each element of the result stands among the concatenated scores, behind a 0 for all that has no score
        score_indices = np.zeros(scored_mask.shape, dtype=np.int64)
        num_scores = 1
        for pack in self._make_packs(sequences, num_targets):
            for row, indices in zip(pack.rows, pack.target_indices, strict=True):
                columns = np.flatnonzero(scored_mask[row])
                score_indices[row, columns[len(columns) - len(indices) :]] = num_scores + indices
            num_scores += len(pack.labels)
            outputs = self._forward_pack(model, pack, device)
            log_probs.append(outputs.log_probs[0])
            entropies.append(outputs.entropy[0] if compute_entropy else None)

        def to_rows(scores: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([scores[0].new_zeros(1), *scores])[torch.from_numpy(score_indices).to(device)]

        return to_rows(log_probs), to_rows(entropies) if compute_entropy else None

    def _forward_pack(self, model: nn.Module, pack: Pack, device: torch.device):
        def row(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)[None]

        backbone = get_base_model(self.accelerator.unwrap_model(model)).base_model
        with gather_hidden_states(backbone, row(pack.parents)[0]), self.accelerator.autocast():
            return model(
                input_ids=row(pack.input_ids),
                position_ids=row(pack.position_ids),
                # A 4D mask is handed down as it is. An attention layer that misses `prefix_tree` fails on this one.
                attention_mask=torch.empty(1, 1, len(pack.input_ids), 0, dtype=torch.bool, device=device),
                prefix_tree=prefix_tree_attention(pack.subtree_end, device),
                shift_labels=row(pack.labels),
                fused_lm_head=True,
            )

    def _split_rows(self, sequences: list[np.ndarray]) -> list[list[int]]:
        """The rows of each pack; all processes get as many, since sharded models communicate in each forward."""
        pack_rows = split_rows(sequences, self.args.max_packed_tokens)
        if self.accelerator.num_processes > 1:
            num_packs = torch.tensor(len(pack_rows), device=self.accelerator.device)
            num_packs = self.accelerator.gather(num_packs).max().item()
            pack_rows = split_rows(sequences, self.args.max_packed_tokens, num_packs)
        return pack_rows

    def _make_packs(self, sequences: list[np.ndarray], num_targets: list[int]) -> list[Pack]:
        pack_rows = self._split_rows(sequences)
        packs = [build_pack(sequences, num_targets, rows) for rows in pack_rows]

        metrics = self._metrics["train" if self.model.training else "eval"]
        num_tokens = sum(len(pack.input_ids) for pack in packs)
        metrics["prefix_sharing/token_fraction"].append(num_tokens / sum(map(len, sequences)))
        metrics["prefix_sharing/recomputed_tokens"].append(
            sum(
                common_prefix_length(sequences[rows[-1]], sequences[next_rows[0]])
                for rows, next_rows in pairwise(pack_rows)
            )
        )
        return packs
