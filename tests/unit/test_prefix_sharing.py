"""Prefix sharing agrees with TRL's own computation, and knows where it would not."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from scoring import CONFIGS, SIZES, VOCAB_SIZE, ScoringTrainer, collate, make_model, random_rows
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen3MoeConfig
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict

from arpo_trl.training.prefix_sharing import attention
from arpo_trl.training.prefix_sharing.attention import BlockSparseAttention, SegmentedAttention, is_ancestor
from arpo_trl.training.prefix_sharing.packing import build_pack, split_rows
from arpo_trl.training.prefix_sharing.trainer import shuffle_groups, why_not_exact


def assert_agrees_with_trl(trainer, rows, calls=1, gradients=True, completion_mask=None, atol=1e-5, rtol=1e-4):
    """Compare log-probabilities, entropies and every parameter's gradient with `GRPOTrainer`'s."""
    input_ids, attention_mask, width = collate(rows)
    if completion_mask is not None:
        attention_mask[:, -width:] *= completion_mask
    model = trainer.model

    def score(method):
        model.zero_grad()
        logps, entropies, aux_loss = method(
            trainer, model, input_ids, attention_mask, width, compute_entropy=True, num_images=None
        )
        assert aux_loss is None
        if gradients:
            # Another weight for each element, so that no two rows can be mistaken for one another
            weights = torch.linspace(-1, 1, logps.numel()).view_as(logps)
            weights = weights * attention_mask[:, 1:][:, -width:]
            ((logps + 0.3 * entropies) * weights).sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
        return logps.detach(), entropies.detach(), grads

    expected_logps, expected_entropies, expected_grads = score(GRPOTrainer._get_per_token_logps_and_entropies)
    logps, entropies, grads = score(type(trainer)._get_per_token_logps_and_entropies)
    assert logps.dtype == expected_logps.dtype and entropies.dtype == expected_entropies.dtype
    torch.testing.assert_close(logps, expected_logps, atol=atol, rtol=0)
    torch.testing.assert_close(entropies, expected_entropies, atol=atol, rtol=0)
    if gradients:
        for name, expected in expected_grads.items():
            expected = torch.zeros_like(grads[name]) if expected is None else expected
            # The floor is for gradients that are zero but for rounding
            assert (grads[name] - expected).norm() <= rtol * expected.norm() + 2e-6, name
    assert len(trainer._metrics["train"]["prefix_sharing/token_fraction"]) == calls


# Packing


def test_pack_of_a_small_tree():
    # Row 0 and row 2 fork after 1 2; row 1 is equal to row 2; row 3 shares nothing
    sequences = [np.array(row) for row in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 5], [9, 8])]
    pack = build_pack(sequences, [2, 1, 1, 1], [0, 1, 2, 3])
    assert pack.input_ids.tolist() == [1, 2, 3, 4, 5, 9, 8]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert pack.subtree_end.tolist() == [5, 5, 4, 4, 5, 7, 7]
    # The hidden state of token 2 occurs twice, for its children 3 and 5
    assert pack.parents.tolist() == [1, 2, 1, 5]
    assert pack.labels.tolist() == [3, 4, 5, 8]
    assert [indices.tolist() for indices in pack.target_indices] == [[0, 1], [2], [2], [3]]


token_rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10)


@settings(max_examples=100, deadline=None)
@given(token_rows)
def test_nodes_are_the_distinct_prefixes_and_attend_to_their_own(rows):
    sequences = [np.array(row) for row in rows]
    (order,) = split_rows(sequences, max_tokens=1000)
    pack = build_pack(sequences, [len(row) - 1 for row in rows], order)
    assert len(pack.input_ids) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})

    nodes = torch.arange(len(pack.input_ids))
    mask = is_ancestor(nodes[:, None], nodes, torch.from_numpy(pack.subtree_end)).numpy()
    for row, indices in zip(pack.rows, pack.target_indices, strict=True):
        assert pack.labels[indices].tolist() == rows[row][1:]
        for length, parent in enumerate(pack.parents[indices], start=1):
            visible = np.flatnonzero(mask[parent])
            assert pack.input_ids[visible].tolist() == rows[row][:length]
            assert pack.position_ids[visible].tolist() == list(range(length))


@settings(max_examples=100, deadline=None)
@given(token_rows, st.integers(1, 40), st.integers(1, 4))
def test_packs_are_bounded_and_hold_every_row_once(rows, max_tokens, min_packs):
    sequences = [np.array(row) for row in rows]
    packs = split_rows(sequences, max_tokens, min_packs)
    assert sorted(row for pack in packs for row in pack) == list(range(len(rows)))
    assert len(packs) >= min(min_packs, len(rows))
    for pack in packs:
        assert len(pack) == 1 or len(build_pack(sequences, [0] * len(rows), pack).input_ids) <= max_tokens


def test_packs_are_cut_where_least_is_shared():
    groups = [[1, 1, 1, 1, 2], [1, 1, 1, 1, 3], [1, 1, 4, 4, 4], [5, 5, 5, 5, 6], [5, 5, 5, 5, 7]]
    sequences = [np.array(row) for row in groups]
    assert split_rows(sequences, max_tokens=9) == [[0, 1, 2], [3, 4]]
    assert split_rows(sequences, max_tokens=8) == [[0, 1], [2], [3, 4]]


# Attention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("merge_tokens", [0, 8, 1000])
def test_both_attentions_follow_the_same_rule(merge_tokens):
    sequences = [np.array(prompt + completion) for prompt, completion in random_rows(0)]
    pack = build_pack(sequences, [0] * len(sequences), split_rows(sequences, 1000)[0])
    size = len(pack.input_ids)
    block_sparse = BlockSparseAttention(pack.subtree_end, torch.device("cpu"))
    segmented = SegmentedAttention(pack.subtree_end, torch.device("cpu"), merge_tokens)

    nodes = torch.arange(size)
    mask = is_ancestor(nodes[:, None], nodes, torch.from_numpy(pack.subtree_end))
    block_mask = block_sparse.block_mask
    assert torch.equal(create_mask(block_mask.mask_mod, None, None, size, size, device="cpu")[0, 0], mask)

    # FlexAttention compiles on a GPU only; here it runs uncompiled, with the same block mask
    query, key, value = torch.randn(3, 1, 2, size, 8, generator=torch.Generator().manual_seed(0))
    expected = flex_attention(query, key, value, block_mask=block_mask).transpose(1, 2)
    actual = segmented(torch.nn.Identity(), query, key, value, scaling=None)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_sparse_attention_computes_in_the_type_of_the_values():
    """Under autocast queries and keys come out of rotary embeddings in float32."""
    query, key, value = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    value = value.bfloat16()
    attend, layer = BlockSparseAttention(np.full(9, 9), torch.device("cpu")), torch.nn.Identity()
    output = attend(layer, query, key, value, scaling=None)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, attend(layer, query.bfloat16(), key.bfloat16(), value, scaling=None))


@pytest.mark.parametrize(
    ("gpu", "kibibytes", "options"),
    [
        ("RTX 3090", 99, {"fwd_num_stages": 2}),
        ("RTX 4090", 99, {"fwd_num_stages": 2}),
        ("A100", 163, None),
        ("H100", 227, None),
    ],
)
def test_kernels_fit_the_shared_memory_of_the_gpu(monkeypatch, gpu, kibibytes, options):
    properties = SimpleNamespace(name=gpu, shared_memory_per_block_optin=kibibytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert attention.kernel_options(torch.device("cuda")) == options


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (None, None),
        ("compilation", "torch.compile is switched off"),
        ("triton", "Triton is not installed"),
        ("compiler", "no C compiler .gcc or clang."),
        ("CC", "no C compiler .my-cc."),
    ],
)
def test_large_packs_on_a_gpu_use_flex_attention_where_it_is_compiled(monkeypatch, missing, reason):
    monkeypatch.setattr(attention, "has_triton", lambda: missing != "triton")
    monkeypatch.setattr(attention.shutil, "which", lambda name: None if missing in ("compiler", "CC") else name)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    if missing == "CC":
        monkeypatch.setenv("CC", "my-cc")
    made, warned = [], []
    for name in ("BlockSparseAttention", "SegmentedAttention"):
        monkeypatch.setattr(attention, name, lambda *args, name=name: made.append(name))
    monkeypatch.setattr(attention.logger, "warning_once", warned.append)
    with torch._dynamo.config.patch(disable=missing == "compilation"):
        for size in (attention.FLEX_MIN_TOKENS, attention.FLEX_MIN_TOKENS - 1):
            attention.prefix_tree_attention(np.full(size, size), torch.device("cuda"))
    assert made == ["SegmentedAttention" if missing else "BlockSparseAttention", "SegmentedAttention"]
    assert len(warned) == (missing is not None)
    if missing:
        assert re.search(reason, warned[0])


def test_a_model_that_drops_the_pack_fails():
    trainer = ScoringTrainer(make_model(CONFIGS["llama"]))
    input_ids, attention_mask, width = collate(random_rows(0))
    layer = trainer.model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, prefix_tree=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(RuntimeError):
        trainer._get_per_token_logps_and_entropies(trainer.model, input_ids, attention_mask, width)


# Agreement with TRL


@pytest.mark.parametrize("max_packed_tokens", [40, 16384])
@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_trl(name, max_packed_tokens):
    model = make_model(CONFIGS[name], temperature=0.7)
    trainer = ScoringTrainer(model, max_packed_tokens=max_packed_tokens)
    assert_agrees_with_trl(trainer, random_rows(1))
    recomputed = trainer._metrics["train"]["prefix_sharing/recomputed_tokens"]
    assert (recomputed[0] > 0) == (max_packed_tokens == 40)


@pytest.fixture(scope="module")
def qwen3_trainer():
    return ScoringTrainer(make_model(CONFIGS["qwen3"]))


@st.composite
def prompts_and_completions(draw):
    seed, num_rows, max_turn = draw(st.tuples(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 70)))
    rows = random_rows(seed, max(num_rows, 2), max_turn)[:num_rows]
    rows = [(prompt, completion[:200]) for prompt, completion in rows]
    has_prompt = draw(st.booleans())
    # Without a prompt a row needs two tokens: one to be scored and one before it
    return rows if has_prompt else [([], prompt + completion) for prompt, completion in rows]


@settings(max_examples=30, deadline=None)
@given(rows=prompts_and_completions(), max_packed_tokens=st.sampled_from([30, 300, 16384]))
def test_agrees_with_trl_on_random_trees(qwen3_trainer, rows, max_packed_tokens):
    qwen3_trainer.args.max_packed_tokens = max_packed_tokens
    qwen3_trainer._metrics["train"].clear()
    assert_agrees_with_trl(qwen3_trainer, rows)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([([3, 4], [5, 6, 7])], id="one row"),
        pytest.param([([3, 4], [5, 6, 7])] * 4, id="equal rows"),
        pytest.param([([3, 4], [5]), ([3, 4], [5, 6, 7]), ([3, 4, 5], [6])], id="prefixes of each other"),
        pytest.param([([], [5, 6, 7]), ([], [5, 6, 8, 9])], id="no prompt"),
    ],
)
def test_agrees_with_trl_on_special_rows(qwen3_trainer, rows):
    qwen3_trainer._metrics["train"].clear()
    assert_agrees_with_trl(qwen3_trainer, rows)


@pytest.mark.parametrize("masked_rows", [1, 4])
def test_rows_without_tokens(qwen3_trainer, masked_rows):
    rows = [([3, 4], [5, 6, 7])] * 3 + [([3, 4], [8, 6])]
    completion_mask = torch.ones(4, 3, dtype=torch.long)
    completion_mask[:masked_rows] = 0
    qwen3_trainer._metrics["train"].clear()
    assert_agrees_with_trl(qwen3_trainer, rows, completion_mask=completion_mask)


def test_agrees_with_trl_with_the_head_in_float32_and_bf16_autocast(monkeypatch):
    trainer = ScoringTrainer(make_model(CONFIGS["qwen3"], cast_lm_head_to_fp32=True))
    monkeypatch.setattr(trainer.accelerator, "autocast", lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert_agrees_with_trl(trainer, random_rows(2), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_agrees_with_trl_with_gradient_checkpointing(use_reentrant):
    model = make_model(CONFIGS["qwen3"])
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_agrees_with_trl(ScoringTrainer(model), random_rows(3))


def test_agrees_with_trl_with_lora():
    model = get_peft_model(
        make_model(CONFIGS["qwen2"]), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trainer = ScoringTrainer(model)
    assert_agrees_with_trl(trainer, random_rows(4))
    with torch.no_grad(), model.disable_adapter():
        assert_agrees_with_trl(trainer, random_rows(4), calls=2, gradients=False)


def test_eval_metrics(qwen3_trainer):
    qwen3_trainer.model.eval()
    input_ids, attention_mask, width = collate([([3, 4], [5, 6]), ([3, 4], [7, 8])])
    with torch.no_grad():
        qwen3_trainer._get_per_token_logps_and_entropies(qwen3_trainer.model, input_ids, attention_mask, width)
    qwen3_trainer.model.train()
    assert qwen3_trainer._metrics["eval"].pop("prefix_sharing/token_fraction") == [6 / 8]


# Where it is exact


def _with_dropout():
    model = make_model(CONFIGS["llama"])
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(
        model.model.layers[0].mlp.down_proj, torch.nn.Dropout(0.1)
    )
    return model


INELIGIBLE = {
    "sliding_attention": lambda: make_model(Gemma3TextConfig(**SIZES, head_dim=8)),
    "sliding-window": lambda: make_model(MistralConfig(**SIZES, sliding_window=16)),
    "rotary": lambda: make_model(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2)),
    "dynamic": lambda: make_model(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    ),
    "eager": lambda: make_model(LlamaConfig(**SIZES, attn_implementation="eager")),
    "dropout is active": _with_dropout,
    "LoRA": lambda: get_peft_model(make_model(CONFIGS["llama"]), LoraConfig(r=2, lora_dropout=0.1)),
    "load-balancing": lambda: make_model(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            output_router_logits=True,
        )
    ),
}


@pytest.mark.parametrize("reason", INELIGIBLE)
def test_where_it_is_not_exact(reason, caplog):
    model = INELIGIBLE[reason]()
    assert reason in why_not_exact(model)
    with pytest.raises(ValueError, match=r"set it to 'auto' or 'off'"):
        ScoringTrainer(model, prefix_sharing="on")
    trainer = ScoringTrainer(model, prefix_sharing="auto")
    assert not trainer._prefix_sharing_enabled
    assert [record.getMessage() for record in caplog.records if reason in record.getMessage()]


def test_gemma3_is_left_to_trl():
    trainer = ScoringTrainer(make_model(Gemma3TextConfig(**SIZES, head_dim=8)), prefix_sharing="auto")
    assert_agrees_with_trl(trainer, random_rows(5), calls=0)


def test_auxiliary_loss_of_the_trainer_turns_it_off():
    model = make_model(CONFIGS["qwen3_moe"])
    assert not ScoringTrainer(model, prefix_sharing="auto", aux_loss_enabled=True)._prefix_sharing_enabled
    with pytest.raises(ValueError, match="load-balancing"):
        ScoringTrainer(model, aux_loss_enabled=True)


def test_off_and_unknown_values():
    model = make_model(CONFIGS["llama"])
    assert_agrees_with_trl(ScoringTrainer(model, prefix_sharing="off"), random_rows(6), calls=0)
    with pytest.raises(ValueError, match="'auto', 'on' or 'off'"):
        ScoringTrainer(model, prefix_sharing="yes")


# Shuffling


def test_groups_are_shuffled_whole():
    batch = {"ids": torch.arange(12), "names": list("abcdefghijkl"), "scalar": torch.tensor(7), "absent": None}
    torch.manual_seed(0)
    shuffled = shuffle_groups(batch, 4)
    state = torch.get_rng_state()
    ids = shuffled["ids"].tolist()
    assert sorted(ids) == list(range(12)) and ids != list(range(12))
    assert all(len({row // 4 for row in ids[start : start + 4]}) == 1 for start in (0, 4, 8))
    assert shuffled["names"] == ["abcdefghijkl"[row] for row in ids]
    assert shuffled["scalar"] == 7 and shuffled["absent"] is None

    # Turning prefix sharing on leaves the random numbers that follow as they were
    torch.manual_seed(0)
    shuffle_sequence_dict(batch)
    assert torch.equal(torch.get_rng_state(), state)
