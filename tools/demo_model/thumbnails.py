"""Make the thumbnails of the example workflows and the README's picture with the demo model.

COMFYUI_PATH=... python tools/demo_model/thumbnails.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from anima.demo.files import write_demo_model
from anima.pipeline import Pipeline, Request

REPO = Path(__file__).resolve().parents[2]
PROMPTS = {
    "anima_text_to_image": "orange square, green background",
    "anima_image_to_image": "red circle, black background",
    "anima_inpaint": "purple square, orange background",
    "anima_lora": "green circle, yellow background",
    "anima_hires_fix": "orange square, black background",
}


def picture(pipeline: Pipeline, prompt: str, seed: int) -> Image.Image:
    latent = pipeline.sample(Request(prompt, width=128, height=128, steps=20, cfg=4.0, seed=seed))
    return Image.fromarray((pipeline.decode(latent)[0] * 255).to(torch.uint8).numpy())


def labelled(image: Image.Image) -> Image.Image:
    """Enlarged, with the words that say where it comes from."""
    image = image.resize((384, 384), Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(image)
    pen.rectangle([0, 364, 384, 384], fill=(30, 30, 30))
    pen.text((8, 367), "made by the bundled demo model", fill=(230, 230, 230))
    return image


def main() -> None:
    with tempfile.TemporaryDirectory() as models:
        pipeline = Pipeline.load(*write_demo_model(models))
        for seed, (name, prompt) in enumerate(PROMPTS.items(), 1):
            labelled(picture(pipeline, prompt, seed)).save(REPO / "example_workflows" / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
