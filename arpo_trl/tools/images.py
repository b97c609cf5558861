"""Looking closer: an environment whose tool shows a part of an image of the prompt, enlarged."""

import copy
from typing import Any

from PIL import Image

from .contract import ToolError


SMALLEST = 0.02  # share of a side
LARGEST_FACTOR = 8.0


class ImageZoom:
    """The tool `zoom` over the images of a row's prompt. For vision-language models with `dialect="native"`.

    As `environment_factory` it takes its images from the dataset's column `image` or `images`, which TRL puts into the
    prompt too.

    Args:
        max_side (`int`, *optional*, defaults to `448`):
            Longer side, in pixels, of what is shown; small parts are enlarged up to it, at most eight times.
    """

    def __init__(self, max_side: int = 448):
        self.max_side = max_side
        self._images: list[Image.Image] = []

    def reset(self, image: Image.Image | None = None, images: list[Image.Image] | None = None, **columns: Any) -> None:
        """
        Takes the images of a row.

        Args:
            image (`PIL.Image.Image`, *optional*), images (`list[PIL.Image.Image]`, *optional*):
                Columns of the dataset, one of them.
            columns:
                The others.
        """
        self._images = list(images or []) if image is None else [image]
        if not self._images:
            raise ValueError("A row has no image to zoom into; give it an `image` or `images`.")

    def fork(self) -> "ImageZoom":
        """A second one. Images are never changed, so they are shared."""
        return copy.copy(self)

    def zoom(self, left: float, top: float, right: float, bottom: float, image: int = 1) -> list[dict]:
        """
        Shows a part of an image, enlarged. Edges are given as shares of the image, from 0 to 1.

        Args:
            left: Left edge; 0 is the left of the image.
            top: Upper edge; 0 is the top of the image.
            right: Right edge; 1 is the right of the image.
            bottom: Lower edge; 1 is the bottom of the image.
            image: Which image, counted from 1.

        Returns:
            The part.
        """
        if not 1 <= image <= len(self._images):
            raise ToolError(f"there is no image {image}; the images are 1 to {len(self._images)}")
        left, top, right, bottom = (min(max(edge, 0.0), 1.0) for edge in (left, top, right, bottom))
        if right - left < SMALLEST or bottom - top < SMALLEST:
            raise ToolError(f"`right` must exceed `left`, and `bottom` exceed `top`, by at least {SMALLEST}")
        whole = self._images[image - 1]
        box = (left * whole.width, top * whole.height, right * whole.width, bottom * whole.height)
        width, height = box[2] - box[0], box[3] - box[1]
        factor = min(self.max_side / max(width, height), LARGEST_FACTOR)
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        part = whole.convert("RGB").resize(size, Image.Resampling.BICUBIC, box=box)
        return [{"type": "image", "image": part}]
