"""Looking into a video: an environment whose tool samples frames and shows them as images. Needs the extra `video`."""

import copy
from typing import Any

import cv2
from PIL import Image

from .contract import ToolError


class VideoFrames:
    """The tool `frames` over the video of a row. For vision-language models with `dialect="native"`.

    As `environment_factory` it takes the path of a file that OpenCV can read from the dataset's column `video`, and
    tells the model in the prompt how long the video is.

    Args:
        max_frames (`int`, *optional*, defaults to `8`):
            Most frames of one call.
        max_side (`int`, *optional*, defaults to `336`):
            Longer side of a frame in pixels; larger ones are made smaller.
    """

    def __init__(self, max_frames: int = 8, max_side: int = 336):
        self.max_frames, self.max_side = max_frames, max_side
        self._path, self._number, self._rate = "", 0, 1.0

    @property
    def seconds(self) -> float:
        """Length of the video."""
        return self._number / self._rate

    def reset(self, video: str, **columns: Any) -> str:
        """
        Opens the video of a row.

        Args:
            video (`str`):
                Path of the file, a column of the dataset.
            columns:
                The others.

        Returns:
            `str`: how long it is, for the prompt.
        """
        capture = cv2.VideoCapture(video)
        number, rate = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), capture.get(cv2.CAP_PROP_FPS)
        capture.release()
        if number < 1 or rate <= 0:
            raise ValueError(f"{video} cannot be read as a video; correct the column `video`.")
        self._path, self._number, self._rate = video, number, rate
        return f"\nThe video is {self.seconds:.1f} s long."

    def fork(self) -> "VideoFrames":
        """A second one over the same file."""
        return copy.copy(self)

    def frames(self, start: float, end: float, count: int = 4) -> list[dict]:
        """
        Shows frames of the video, evenly spaced between two moments.

        Args:
            start: First moment, in seconds.
            end: Last moment, in seconds.
            count: How many frames.

        Returns:
            The frames, each with its moment.
        """
        if not 1 <= count <= self.max_frames:
            raise ToolError(f"`count` must be between 1 and {self.max_frames}")
        if not 0 <= start <= end or start > self.seconds:
            raise ToolError(f"`start` and `end` must be in order and within the {self.seconds:.1f} s of the video")
        span = min(end, self.seconds) - start
        blocks: list[dict] = []
        capture = cv2.VideoCapture(self._path)
        try:
            for index in range(count):
                moment = start + (index + 0.5) * span / count
                capture.set(cv2.CAP_PROP_POS_FRAMES, min(int(moment * self._rate), self._number - 1))
                found, pixels = capture.read()
                if not found:
                    raise ToolError(f"the video has no frame at {moment:.1f} s")
                frame = Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))
                frame.thumbnail((self.max_side, self.max_side))
                blocks += [{"type": "text", "text": f"{moment:.1f} s:"}, {"type": "image", "image": frame}]
        finally:
            capture.release()
        return blocks
