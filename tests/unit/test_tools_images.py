"""Tools that show images: a part of an image, frames of a video."""

import cv2
import numpy as np
import pytest
from PIL import Image

from arpo_trl.rollout.environments import environment_tools, fork_environment
from arpo_trl.tools.calling import bind_arguments, to_content, tool_schema
from arpo_trl.tools.contract import ToolError
from arpo_trl.tools.images import ImageZoom
from arpo_trl.tools.video import VideoFrames


def halves() -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    return image


def zoom_into(**columns) -> ImageZoom:
    environment = ImageZoom(max_side=60)
    environment.reset(**columns)
    return environment


def test_a_part_is_cut_out_and_enlarged():
    environment = zoom_into(image=halves(), prompt="ignored")
    (block,) = to_content(environment.zoom(0.5, 0, 1, 0.5), 100)
    assert block["type"] == "image" and block["image"].size == (60, 30)
    assert block["image"].getpixel((30, 15)) == (0, 0, 255)
    (whole,) = environment.zoom(-1, 0, 2, 1)
    assert whole["image"].size == (60, 30) and whole["image"].getpixel((5, 5)) == (255, 0, 0)
    (tiny,) = environment.zoom(0.5, 0.5, 0.6, 0.6)
    assert tiny["image"].size == (32, 16)  # eight times


def test_one_of_several_images():
    environment = zoom_into(images=[halves(), Image.new("L", (10, 10), 255)])
    (block,) = environment.zoom(0, 0, 1, 1, image=2)
    assert block["image"].getpixel((3, 3)) == (255, 255, 255)
    for arguments, said in (((0, 0, 1, 1, 3), "the images are 1 to 2"), ((0.5, 0, 0.4, 1), "exceed `left`")):
        with pytest.raises(ToolError, match=said):
            environment.zoom(*arguments)
    with pytest.raises(ValueError, match="no image to zoom into"):
        zoom_into()


def test_forks_share_the_image_and_schemas_tell_the_arguments():
    environment = zoom_into(image=halves())
    twin = fork_environment(environment)
    environment.reset(image=Image.new("RGB", (8, 8)))
    assert twin.zoom(0, 0, 0.4, 1)[0]["image"].getpixel((2, 2)) == (255, 0, 0)
    tools = {**environment_tools(environment), **environment_tools(VideoFrames())}
    assert sorted(tools) == ["frames", "zoom"]
    assert tool_schema(tools["zoom"])["function"]["parameters"]["required"] == ["left", "top", "right", "bottom"]
    assert bind_arguments(tools["frames"], {"start": "1", "end": 2})["start"] == 1.0


@pytest.fixture(scope="module")
def film(tmp_path_factory) -> str:
    """Three seconds, ten frames each, which grow lighter."""
    path = str(tmp_path_factory.mktemp("film") / "film.mp4")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 32))
    for number in range(30):
        writer.write(np.full((32, 64, 3), 8 * number, dtype=np.uint8))
    writer.release()
    return path


def test_frames_are_spread_over_the_asked_seconds(film):
    environment = VideoFrames(max_side=32)
    assert environment.reset(video=film) == "\nThe video is 3.0 s long."
    blocks = to_content(fork_environment(environment).frames(0, 3, count=3), 100)
    assert [block.get("text") for block in blocks[::2]] == ["0.5 s:", "1.5 s:", "2.5 s:"]
    shades = [block["image"].getpixel((5, 5))[0] for block in blocks[1::2]]
    assert shades == pytest.approx([40, 120, 200], abs=12) and blocks[1]["image"].size == (32, 16)


def test_a_video_that_is_none_and_moments_that_it_has_not(film, tmp_path):
    environment = VideoFrames()
    (tmp_path / "text.mp4").write_text("no video")
    for path in ("no/such.mp4", str(tmp_path / "text.mp4")):
        with pytest.raises(ValueError, match="cannot be read as a video"):
            environment.reset(video=path)
    environment.reset(video=film)
    for arguments in ((4, 5), (2, 1), (-1, 1)):
        with pytest.raises(ToolError, match="within the 3.0 s"):
            environment.frames(*arguments)
    with pytest.raises(ToolError, match="between 1 and 8"):
        environment.frames(0, 1, count=9)
