"""The probes against hand-built batches: vLLM's V1 batch updates, and Model Runner V2 contexts (no GPU needed)."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode


pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

from arpo_trl.algorithms.entropy import entropy_from_logits
from arpo_trl.rollout.engines.vllm_probe import EntropyProbe, EntropyProbeV2, watch_args


VOCAB = 50


def params(key: str, watch: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, extra_args=watch_args(key, watch) if watch else None)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture
def probe():
    return EntropyProbe(None, torch.device("cpu"), False)


def test_probe_leaves_the_logits_alone_and_greedy_sampling_too(probe):
    probe.recorder.open("a")
    probe.update_state(BatchUpdate(1, [], [(0, params("a", 5), [1, 2], [])], []))
    logits = random_logits(1, 0)
    before = logits.clone()
    assert probe.apply(logits) is logits
    assert torch.equal(logits, before)
    assert probe.is_argmax_invariant()


def test_partial_prefills_are_overwritten(probe):
    """Chunked prefill calls the probe once a chunk, with no token sampled in between."""
    output_ids = []
    probe.recorder.open("a")
    probe.update_state(BatchUpdate(1, [], [(0, params("a", 2), list(range(9)), output_ids)], []))
    for chunk in range(3):
        probe.apply(last := random_logits(1, chunk))
    output_ids.append(7)
    assert probe.recorder.read("a", 0, 1) == pytest.approx(entropy_from_logits(last).tolist())


def test_only_watched_rows_inside_their_window_are_computed(probe, monkeypatch):
    computed = []
    monkeypatch.setattr(
        "arpo_trl.rollout.engines.vllm_probe.entropy_from_logits",
        lambda logits: computed.append(len(logits)) or entropy_from_logits(logits),
    )
    outputs = [[], [], []]
    added = [(row, params(str(row), watch), [1], outputs[row]) for row, watch in enumerate((2, 0, 1))]
    probe.update_state(BatchUpdate(3, [], added, []))
    for step in range(4):
        probe.apply(random_logits(3, step))
        for output_ids in outputs:
            output_ids.append(5)
    assert computed == [2, 1]


def test_rows_are_followed_through_random_joins_leaves_and_moves(probe):
    """Against a batch kept as vLLM keeps it: freed rows refilled first, then the tail moved down, then swaps."""
    rng = random.Random(0)
    batch: list[dict] = []
    expected: dict[str, list[float]] = {}
    counter = 0
    for step in range(300):
        removed = sorted(rng.sample(range(len(batch)), rng.randint(0, min(3, len(batch)))), reverse=True)
        rows: list[dict | None] = [None if row in removed else request for row, request in enumerate(batch)]
        added, moved = [], []
        for _ in range(rng.randint(0, 3)):
            key, watch, output_ids = f"r{counter}", rng.choice((0, 1, 4, 30)), []
            counter += 1
            probe.recorder.open(key)
            request = {"key": key, "watch": watch, "output_ids": output_ids}
            row = removed.pop() if removed else len(rows)
            rows[row : row + 1] = [request]
            added.append((row, params(key, watch), [1], output_ids))
        for hole in sorted(removed):
            while rows and rows[-1] is None:
                rows.pop()
            if hole < len(rows):
                rows[hole] = rows.pop()
                moved.append((len(rows), hole, MoveDirectionality.UNIDIRECTIONAL))
        while rows and rows[-1] is None:
            rows.pop()
        if len(rows) > 1 and rng.random() < 0.3:
            one, other = rng.sample(range(len(rows)), 2)
            rows[one], rows[other] = rows[other], rows[one]
            moved.append((one, other, MoveDirectionality.SWAP))
        batch = rows
        changed = added or moved or removed
        probe.update_state(BatchUpdate(len(batch), removed, added, moved) if changed else None)
        if not batch:
            continue
        logits = random_logits(len(batch), step)
        probe.apply(logits)
        for request, entropy in zip(batch, entropy_from_logits(logits).tolist(), strict=True):
            request["output_ids"].append(0)
            position = len(request["output_ids"]) - 1
            if position < request["watch"]:
                expected.setdefault(request["key"], []).append(entropy)
    assert len(expected) > 100
    for key, entropies in expected.items():
        assert probe.recorder.read(key, 0, len(entropies)) == pytest.approx(entropies)


@pytest.mark.parametrize("probe_class", [EntropyProbe, EntropyProbeV2])
def test_watching_a_greedy_request_is_refused(probe_class):
    probe_class.validate_params(params("a", 0, temperature=0.0))
    probe_class.validate_params(params("a", 3))
    with pytest.raises(ValueError, match="temperature"):
        probe_class.validate_params(params("a", 3, temperature=0.0))


def v2_config(speculative: object = None, sharded: bool = False):
    return SimpleNamespace(
        speculative_config=speculative, parallel_config=SimpleNamespace(enable_batch_sharded_sampling=sharded)
    )


def v2_context(slots: list[int], lengths: list[int]) -> LogitsContext:
    index = torch.tensor(slots)
    return LogitsContext(
        expanded_idx_mapping=index,
        idx_mapping=index,
        idx_mapping_np=np.array(slots, dtype=np.int32),
        expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32),
        input_ids=torch.zeros(len(slots), dtype=torch.int32),
        pos=torch.tensor(lengths) - 1,
        seq_lens_upper_bound_np=np.array(lengths, dtype=np.int32),
    )


@pytest.fixture
def probe_v2():
    prompt_len = SimpleNamespace(np=np.zeros(8, dtype=np.int32))
    probe = EntropyProbeV2(v2_config(), SimpleNamespace(prompt_len=prompt_len, max_num_reqs=8))
    probe.prompt_len_np = prompt_len.np
    return probe


def test_v2_divides_by_each_rows_temperature_and_maps_rows_by_slot(probe_v2):
    probe_v2.prompt_len_np[[5, 2, 7]] = 10, 20, 30
    for slot, key, watch, temperature in ((5, "a", 3, 0.5), (2, "b", 0, 1.0), (7, "c", 3, 2.0)):
        probe_v2.recorder.open(key)
        assert probe_v2.add_request(slot, params(key, watch, temperature)) is (watch > 0)
    for step, slots in enumerate(([7, 2, 5], [5, 7, 2])):
        lengths = [int(probe_v2.prompt_len_np[slot]) + step for slot in slots]
        logits = random_logits(3, step)
        before = logits.clone()
        assert probe_v2.apply(logits, v2_context(slots, lengths)) is logits
        assert torch.equal(logits, before)
        for key, slot, temperature in (("a", 5, 0.5), ("c", 7, 2.0)):
            expected = entropy_from_logits(logits[slots.index(slot)][None] / temperature).tolist()
            assert probe_v2.recorder.read(key, step, step + 1) == pytest.approx(expected)


def test_v2_skips_partial_prefills_stops_at_the_window_and_resumes(probe_v2):
    probe_v2.recorder.open("a")
    probe_v2.prompt_len_np[3] = 10
    probe_v2.add_request(3, params("a", 2))
    expected = []
    for step, length in enumerate((4, 8, 10, 11, 12)):
        logits = random_logits(1, step)
        probe_v2.apply(logits, v2_context([3], [length]))
        if length in (10, 11):
            expected += entropy_from_logits(logits).tolist()
    assert probe_v2.recorder.read("a", 0, 2) == pytest.approx(expected)
    with pytest.raises(KeyError):
        probe_v2.recorder.read("a", 2, 3)
    # Preempted after one token and resumed in another slot, whose last occupant was watched too.
    probe_v2.recorder.open("b")
    probe_v2.add_request(4, params("b", 9))
    probe_v2.prompt_len_np[4] = 10
    probe_v2.add_request(4, params("a", 2))
    logits = random_logits(1, 9)
    probe_v2.apply(logits, v2_context([4], [11]))
    assert probe_v2.recorder.read("a", 1, 2) == pytest.approx(entropy_from_logits(logits).tolist())


def test_v2_forgets_the_last_occupant_of_a_slot(probe_v2):
    probe_v2.recorder.open("a")
    probe_v2.prompt_len_np[0] = 3
    probe_v2.add_request(0, params("a", 5))
    assert probe_v2.add_request(0, params("b", 0)) is False
    probe_v2.apply(random_logits(1, 0), v2_context([0], [3]))
    with pytest.raises(KeyError):
        probe_v2.recorder.read("a", 0, 1)


class Copies(TorchFunctionMode):
    """What is copied to another device, and how; `torch.tensor` does it in a way that waits."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.copied, self.pinned = [], []
        # There is no accelerator here to pin it for, and vLLM may have replaced this.
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor))

    def pin(self, tensor):
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert function is not torch.tensor and function is not torch.as_tensor
        if function is torch.Tensor.to and isinstance(args[1], torch.device):
            self.copied.append(
                (args[0].numel(), kwargs.get("non_blocking", False), any(args[0] is tensor for tensor in self.pinned))
            )
        return function(*args, **kwargs)


@pytest.mark.parametrize(("temperature", "copies"), [(1.0, 1), (0.7, 2)])
def test_v2_never_waits_for_the_device(probe_v2, monkeypatch, temperature, copies):
    """Rows, and temperatures where one is not 1, in one copy each, from pinned memory, of the watched rows only."""
    written = []
    monkeypatch.setattr(probe_v2.recorder, "write", lambda keys, entropies: written.append((keys, entropies)))
    for slot in range(8):
        probe_v2.add_request(slot, params(f"r{slot}", 3 if slot % 2 else 0, temperature))
    logits, context = torch.empty(8, VOCAB, device="meta"), v2_context(list(range(8)), [1] * 8)
    with Copies(monkeypatch) as seen:
        assert probe_v2.apply(logits, context) is logits
    assert seen.copied == [(4, True, True)] * copies
    [(keys, entropies)] = written
    assert keys == [(f"r{slot}", 1) for slot in (1, 3, 5, 7)] and entropies.shape == (4,)


def test_v1_never_waits_for_the_device(probe, monkeypatch):
    monkeypatch.setattr(probe.recorder, "write", lambda keys, entropies: None)
    probe.update_state(BatchUpdate(2, [], [(row, params(str(row), 5), [1], []) for row in range(2)], []))
    logits = torch.empty(2, VOCAB, device="meta")
    with Copies(monkeypatch) as seen:
        probe.apply(logits)
    assert seen.copied == [(2, True, True)]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_v2_reads_the_rows_that_a_loop_would(data):
    """Slots in any order, recycled, at any position, unwatched ones between them."""
    num_slots = data.draw(st.integers(1, 12))
    prompt_len = SimpleNamespace(np=np.array(data.draw(st.lists(st.integers(1, 9), min_size=12, max_size=12))))
    probe = EntropyProbeV2(v2_config(), SimpleNamespace(prompt_len=prompt_len, max_num_reqs=12))
    requests = {}
    for slot in data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, max_size=20)):
        key = f"r{len(requests)}-{slot}"
        requests[slot] = key, data.draw(st.integers(0, 4)), data.draw(st.sampled_from([0.5, 1.0, 2.0]))
        assert probe.add_request(slot, params(*requests[slot])) is (requests[slot][1] > 0)
    slots = data.draw(st.permutations(sorted(requests)))
    lengths = [data.draw(st.integers(1, 15)) for _ in slots]
    logits = random_logits(len(slots), seed=len(slots))
    for key, _, _ in requests.values():
        probe.recorder.open(key)
    probe.apply(logits, v2_context(slots, lengths))
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        key, watch, temperature = requests[slot]
        position = length - int(prompt_len.np[slot])
        if 0 <= position < watch:
            [entropy] = probe.recorder.read(key, position, position + 1)
            assert entropy == entropy_from_logits(logits[row][None] / temperature).item()
        else:
            with pytest.raises(KeyError):
                probe.recorder.read(key, position, position + 1)


def test_v2_refuses_what_it_cannot_map():
    state = SimpleNamespace(prompt_len=None)
    with pytest.raises(ValueError, match="speculative_config"):
        EntropyProbeV2(v2_config(speculative=object()), state)
    with pytest.raises(ValueError, match="enable_batch_sharded_sampling"):
        EntropyProbeV2(v2_config(sharded=True), state)
