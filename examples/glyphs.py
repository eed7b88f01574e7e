"""Pictures for the examples, made where they are needed: letters in the fonts that matplotlib brings."""

import string
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

SIZE = 24  # pixels of a side
CLASSES = string.ascii_uppercase
HELD_OUT_FONTS = ("DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneralItalic", "cmss10")
TRAIN_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique", "DejaVuSansMono"),
    *("DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("DejaVuSansDisplay", "DejaVuSerifDisplay", "STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmti10", "cmtt10"),
)


def glyphs(fonts: tuple[str, ...], copies: int, *, seed: int) -> list[dict[str, torch.Tensor]]:
    """Draw every letter in every font, each time turned, moved and scaled a little, on a noisy ground.

    Args:
        fonts: Names of fonts.
        copies: How often each letter of each font is drawn.
        seed: Of the turns, moves, scales and noise.

    Returns:
        Examples with "images", (1, SIZE, SIZE) and around 0, and the "labels", the letter's place in the alphabet.
    """
    random = np.random.default_rng(seed)
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    sized = [[ImageFont.truetype(str(folder / f"{font}.ttf"), size) for size in range(15, 22)] for font in fonts]
    examples = []
    for label, letter in enumerate(CLASSES):
        for sizes in sized:
            for _ in range(copies):
                picture = Image.new("L", (SIZE, SIZE))
                place = tuple(SIZE / 2 + random.uniform(-2, 2, size=2))
                font = sizes[random.integers(len(sizes))]
                ImageDraw.Draw(picture).text(place, letter, fill=255, font=font, anchor="mm")
                picture = picture.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR)
                pixels = np.asarray(picture, dtype=np.float32) / 255 - 0.5 + random.normal(0, 0.2, picture.size)
                image = torch.from_numpy(pixels.astype(np.float32))[None]
                examples.append({"images": image, "labels": torch.tensor(label)})
    return examples
