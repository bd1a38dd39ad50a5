"""The largest image that a request can carry, prepared as the engine's tokenizer workers prepare one."""

from __future__ import annotations

import io
from typing import Any

from prefill_probe.engine import ShapeRefused

# Pixels of each side. Processors scale a larger picture down to what the checkpoint allows: for Qwen's, to this.
SIDE = 4096


def with_image(processor: Any, text: Any, tokens: int) -> Any:
    """A prompt of at least ``tokens`` tokens that begins with the largest image, and goes on with ``text``.

    Args:
        processor: the engine's own multimodal processor.
        text: token ids [n], int32, n >= tokens; ids of image placeholders in it are replaced.

    Returns:
        the processor's result: ``input_ids``, ``mm_items``, ``mrope_positions``, ``mrope_delta``.

    Raises:
        ShapeRefused: the processor cannot prepare an image (a checkpoint without its configuration, say).
    """
    import torch

    placeholder = [int(token) for token in processor.placeholder]
    for token in placeholder:
        text = torch.where(text == token, torch.zeros_like(text), text)
    try:
        picture = _picture()
        image = processor.apply(torch.tensor(placeholder, dtype=torch.int32), [picture])
        rest = text[: max(0, tokens - len(image.input_ids))]
        # Once more with the text behind it: positions are computed for the whole prompt.
        return processor.apply(torch.cat([torch.tensor(placeholder, dtype=torch.int32), rest]), [picture])
    except Exception as error:
        raise ShapeRefused(f"the engine's processor prepares no image: {type(error).__name__}: {error}") from None


def _picture() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (120, 90, 60)).save(file, "BMP")  # written and read at once, unlike a compressed one
    return file.getvalue()
