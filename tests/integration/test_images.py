"""Images of prompts and of tool results: what the transformers engine samples from is what the update computes."""

import copy
import functools
import json
import math
import random
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset, Features, Json
from datasets import Image as DatasetImage
from PIL import Image
from transformers import LogitsProcessor

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.rollout.dialects import make_dialect
from arpo_trl.rollout.engines.protocol import Request
from arpo_trl.rollout.engines.transformers_engine import TransformersEngine
from arpo_trl.rollout.vision import ImageEncoder
from arpo_trl.tools.contract import ToolResult
from arpo_trl.tools.images import ImageZoom
from tests.small_vlm import small_vlm
from tests.training_run import CPU_RUN


@pytest.fixture(scope="module")
def vlm():
    return small_vlm()


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Colours that no two pictures share."""
    rng = random.Random(seed)
    return Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))


def make_engine(model, processor, **options) -> TransformersEngine:
    encoder = ImageEncoder(processor, processor.image_token_id)
    return TransformersEngine(
        lambda: nullcontext(model),
        [processor.tokenizer.eos_token_id],
        1000,
        **{"image_encoder": encoder, "suppressed_ids": [processor.image_token_id], **options},
    )


def prompt(processor, text: str, images: list[Image.Image]) -> list[int]:
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    inputs = processor.apply_chat_template(
        [[{"role": "user", "content": content}]], tokenize=True, return_dict=True, add_generation_prompt=True
    )
    return inputs["input_ids"][0]


def full_logprobs(model, processor, ids: list[int], sampled: list[int], images, suppress=True) -> list[float]:
    """One forward pass over everything, as TRL makes it in the update."""
    sequence = torch.tensor([ids + sampled])
    inputs = {}
    if images:
        inputs = dict(processor.image_processor(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (sequence == processor.image_token_id).long()
    with torch.no_grad():
        logits = model(input_ids=sequence, attention_mask=torch.ones_like(sequence), **inputs).logits[0]
    if suppress:
        logits[:, processor.image_token_id] = -torch.inf
    logprobs = logits.log_softmax(dim=-1)
    return [logprobs[len(ids) - 1 + k, token].item() for k, token in enumerate(sampled)]


def run(engine, requests, late=()):
    """Sampled tokens and logprobs by request; `late` ones come in when the others have sampled for a while."""
    sampled = {request.id: ([], []) for request in [*requests, *late]}
    engine.begin()
    for request in requests:
        engine.submit(request)
    steps = 0
    while engine.has_work():
        steps += 1
        if steps == 4:
            for request in late:
                engine.submit(request)
        for event in engine.poll():
            sampled[event.id][0].extend(event.token_ids)
            sampled[event.id][1].extend(event.logprobs)
    engine.end()
    return sampled


def test_what_is_sampled_with_images_is_what_the_update_computes(vlm):
    """Rows with no, one and two images of several sizes and with prompts of several lengths share a batch."""
    model, processor = vlm
    pictures = [[], [picture(1, 24, 16)], [picture(2, 8, 40), picture(3, 32, 32)], [picture(4, 64, 8)]]
    texts = ["what", "what is this, and why is it here?", "compare", "and this"]
    requests = [
        Request(str(k), prompt(processor, text, images), 12, seed=k, images=images or None)
        for k, (text, images) in enumerate(zip(texts, pictures, strict=True))
    ]
    sampled = run(make_engine(model, processor), requests[:2], late=requests[2:])
    for request in requests:
        tokens, logprobs = sampled[request.id]
        expected = full_logprobs(model, processor, request.prompt_ids, tokens, request.images)
        assert len(tokens) >= 1 and processor.image_token_id not in tokens
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_another_image_is_another_distribution(vlm):
    model, processor = vlm
    ids = prompt(processor, "what", [picture(1, 24, 16)])
    first, second = (full_logprobs(model, processor, ids, ids[:3], [picture(seed, 24, 16)]) for seed in (1, 2))
    assert first != pytest.approx(second, abs=1e-3)


def look(colour: str) -> list:
    """Shows a colour.

    Args:
        colour: Which.
    """
    return [{"type": "image", "image": Image.new("RGB", (24, 16), colour)}, {"type": "text", "text": colour}]


def test_an_image_in_a_tool_result_is_seen_in_the_next_turn(vlm):
    model, processor = vlm
    dialect = make_dialect("native", processor, [look])
    images = [picture(1, 16, 16), look("red")[0]["image"]]
    ids = prompt(processor, "what", images[:1]) + [40, 41, processor.tokenizer.eos_token_id]
    ids += dialect.result_ids(ids[-3:], [], [ToolResult("look", look("red"))])
    assert ids.count(processor.image_token_id) == 4 + 6
    sampled = run(make_engine(model, processor), [Request("0", ids, 8, seed=0, images=images)])
    tokens, logprobs = sampled["0"]
    assert logprobs == pytest.approx(full_logprobs(model, processor, ids, tokens, images), abs=1e-4)


def test_an_engine_without_an_encoder_refuses_images(vlm):
    model, processor = vlm
    engine = make_engine(model, processor, image_encoder=None)
    engine.begin()
    with pytest.raises(
        ValueError, match="images need a model of the Qwen-VL line and its processor: set `use_vllm=True`"
    ):
        engine.submit(Request("0", [1, 2], 1, images=[picture(0, 8, 8)]))
    engine.end()


# In training


class Scripted(LogitsProcessor):
    """Lets a turn begin with any of a few tokens, then forces it to zoom where that token says, twice, then to end."""

    def __init__(self, processor):
        self.tokenizer = processor.tokenizer
        self.opening = self.tokenizer.encode("<|im_start|>assistant\n")
        self.free = list(range(100, 160))

    def turn(self, first: int, calls: int) -> list[int]:
        arguments = {"left": first % 3 / 4, "top": 0, "right": 1, "bottom": 0.5 + first % 2 / 2}
        call = json.dumps({"name": "zoom", "arguments": arguments})
        text = f"\n<tool_call>\n{call}\n</tool_call>" if calls < 2 else " nothing more"
        return [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row, sequence in enumerate(ids.tolist()):
            begin = len(sequence) - sequence[::-1].index(self.opening[0]) - 1 + len(self.opening)
            turn, calls = sequence[begin:], self.tokenizer.decode(sequence).count("<tool_response>")
            allowed = self.free if not turn else [self.turn(turn[0], calls)[len(turn) - 1]]
            forced[row, allowed] = scores[row, allowed]
        return forced


def make_trainer(vlm, folder, reward, **options) -> ARPOTrainer:
    model, processor = vlm
    images = [picture(5, 32, 16), picture(6, 24, 24)]
    rows = {"prompt": [[{"role": "user", "content": "Look."}]] * 2, "image": images}
    trainer = ARPOTrainer(
        copy.deepcopy(model),
        reward,
        ARPOConfig(
            output_dir=str(folder),
            **{
                "num_generations": 4,
                "num_initial_rollouts": 2,
                "branch_alpha": 1.0,
                "per_device_train_batch_size": 8,
                "max_steps": 2,
                "learning_rate": 1e-3,
                "max_completion_length": 700,
                "entropy_window": 4,
                **CPU_RUN,
                "rollout_log": True,
                **options,
            },
        ),
        Dataset.from_dict(rows, features=Features({"prompt": [Json()], "image": DatasetImage()})),
        processing_class=processor,
        environment_factory=functools.partial(ImageZoom, 32),
    )
    trainer._sampler.engine._truncate.append(Scripted(processor))
    return trainer


def images_in(messages) -> list[Image.Image]:
    blocks = [block for m in messages if isinstance(m["content"], list) for block in m["content"]]
    return [block["image"] for block in blocks if block["type"] == "image"]


def test_rows_see_the_images_of_their_own_path_and_train_on_them(vlm, tmp_path):
    seen = []

    def own_images(completions, completion_ids, image, rollout_info, **kwargs):
        for messages, whole, info in zip(completions, image, rollout_info, strict=True):
            zoom = ImageZoom(32)
            zoom.reset(image=whole)
            calls = [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", ())]
            shown = [zoom.zoom(**arguments)[0]["image"] for arguments in calls]
            assert [image.tobytes() for image in shown] == [image.tobytes() for image in images_in(messages)]
            seen.append((info["forked"], len(shown)))
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    trainer = make_trainer(vlm, tmp_path, own_images)
    before = trainer.model.model.visual.patch_embed.proj.weight.clone()
    trainer.train()
    assert [number for _, number in seen] == [2] * 16 and sum(forked for forked, _ in seen) == 8
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logs)
    assert not torch.equal(before, trainer.model.model.visual.patch_embed.proj.weight)

    # What the model saw while sampling is what it is given in the update: the entropies agree, row by row.
    trainer.model.train()
    batch = trainer._generate_and_score_completions(
        [trainer.train_dataset[index] for index in (0, 1) for _ in range(4)]
    )
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]
    vision = {key: batch[key] for key in ("pixel_values", "image_grid_thw", "mm_token_type_ids", "num_images")}
    assert vision["num_images"] == [3] * 8
    with torch.no_grad():
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model.eval(), ids, mask, length, compute_entropy=True, **vision
        )
    watched = 0
    for row, trajectory in enumerate(t for tree in trainer._trees for t in tree.trajectories):
        start = 0
        for segment in trajectory.segments():
            computed = entropies[row, start : start + len(segment.entropies)]
            assert segment.entropies.tolist() == pytest.approx(computed.tolist(), abs=1e-3)
            watched += len(segment.entropies)
            start += len(segment.ids)
        # Forks no longer watch entropies: their whole row, computed alone with the images of its path.
        own = trainer._rows[row]
        images = [trainer.train_dataset[row // 4]["image"], *images_in(own.messages)]
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        alone = full_logprobs(trainer.model, vlm[1], prompt_ids, own.ids, images, suppress=False)
        assert logps[row, : len(own.ids)].tolist() == pytest.approx(alone, abs=1e-3)
    assert watched >= 48
