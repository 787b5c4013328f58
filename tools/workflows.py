"""The example workflows, written once: this makes the API twins; the UI files are saved by the real frontend.

python tools/workflows.py            write example_workflows/api/*.json
python tools/workflows.py --ui       also load each in a headless Chromium and save the UI form
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "example_workflows"
POSITIVE = (
    "masterpiece, best quality, score_7, safe, 1girl, solo, silver hair, blue eyes, school uniform, smile, "
    "looking at viewer, cherry blossoms, outdoors. A girl stands under a blooming cherry tree in soft morning light."
)
NEGATIVE = "worst quality, low quality, score_1, score_2, score_3, blurry, jpeg artifacts, sepia"

Graph = dict[str, dict[str, Any]]


def node(class_type: str, title: str, at: tuple[int, int], **inputs: Any) -> dict[str, Any]:
    """One node of an API graph; `at` is its place on the canvas."""
    return {"class_type": class_type, "inputs": inputs, "_meta": {"title": title, "at": at}}


def base(with_latent: bool = True) -> Graph:
    """Loaders, prompts, sampler, decoder, saver."""
    graph = {
        "1": node("AnimaLoader", "Load Anima", (0, 0), unet_name="anima-base-v1.0.safetensors",
                  clip_name="qwen_3_06b_base.safetensors", vae_name="qwen_image_vae.safetensors",
                  weight_dtype="default"),
        "2": node("Qwen3AdapterTextEncode", "Prompt", (400, 0), text=POSITIVE, clip=["1", 1], prompt_per_line=False),
        "3": node("Qwen3AdapterTextEncode", "Negative prompt", (400, 320), text=NEGATIVE, clip=["1", 1],
                  prompt_per_line=False),
        "5": node("KSampler", "KSampler", (860, 0), model=["1", 0], positive=["2", 0], negative=["3", 0],
                  latent_image=["4", 0], seed=1, steps=30, cfg=4.0, sampler_name="er_sde", scheduler="simple",
                  denoise=1.0),
        "6": node("WanVAEDecode", "Decode", (1240, 0), samples=["5", 0], vae=["1", 2], tile_size=0),
        "7": node("SaveImage", "Save", (1240, 220), images=["6", 0], filename_prefix="Anima"),
    }  # fmt: skip
    if with_latent:
        graph["4"] = node("AnimaEmptyLatent", "Size", (0, 340), width=1024, height=1024, batch_size=1)
    return graph


def image_to_image() -> Graph:
    graph = base(with_latent=False)
    graph["8"] = node("LoadImage", "Picture", (0, 340), image="example.png")
    graph["4"] = node("WanVAEEncode", "Encode", (400, 640), pixels=["8", 0], vae=["1", 2], tile_size=0)
    graph["5"]["inputs"]["denoise"] = 0.6
    return graph


def inpaint() -> Graph:
    """The mask is the picture's alpha channel, painted in the mask editor."""
    graph = image_to_image()
    graph["9"] = node("SetLatentNoiseMask", "Mask", (860, 640), samples=["4", 0], mask=["8", 1])
    graph["5"]["inputs"] |= {"latent_image": ["9", 0], "denoise": 1.0}
    return graph


def lora() -> Graph:
    graph = base()
    graph["8"] = node("AnimaLoraLoader", "LoRA", (0, 560), model=["1", 0], clip=["1", 1],
                      lora_name="anima-turbo-lora-v0.2.safetensors", strength_model=1.0, strength_clip=1.0)  # fmt: skip
    for prompt in ("2", "3"):
        graph[prompt]["inputs"]["clip"] = ["8", 1]
    graph["5"]["inputs"] |= {"model": ["8", 0], "steps": 8, "cfg": 1.0, "sampler_name": "euler"}
    return graph


def hires() -> Graph:
    """A first pass at the trained size, the latent enlarged, a second pass over it."""
    graph = base()
    graph["8"] = node(
        "LatentUpscaleBy", "Enlarge", (860, 320), samples=["5", 0], upscale_method="bislerp", scale_by=1.5
    )
    graph["9"] = node("KSampler", "Second pass", (860, 480), **{
        **graph["5"]["inputs"], "latent_image": ["8", 0], "steps": 20, "denoise": 0.55,
    })  # fmt: skip
    graph["6"]["inputs"]["samples"] = ["9", 0]
    return graph


WORKFLOWS = {
    "anima_text_to_image": base,
    "anima_image_to_image": image_to_image,
    "anima_inpaint": inpaint,
    "anima_lora": lora,
    "anima_hires_fix": hires,
}


def write_api() -> None:
    for name, build in WORKFLOWS.items():
        graph = build()
        for entry in graph.values():
            entry["_meta"] = {"title": entry["_meta"]["title"]}
        path = FOLDER / "api" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(graph, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ui", metavar="URL", help="address of a running ComfyUI with this pack")
    args = parser.parse_args()
    write_api()
    if args.ui:
        save_ui(args.ui)


def save_ui(url: str) -> None:
    """Load every workflow into the frontend at `url`, place its nodes, save what the frontend serialises."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.goto(url)
        page.wait_for_function("Boolean(window.app?.graph && window.LiteGraph?.registered_node_types?.AnimaLoader)")
        for name, build in WORKFLOWS.items():
            graph = build()
            places = {key: entry["_meta"]["at"] for key, entry in graph.items()}
            workflow = page.evaluate(
                """async ([graph, places, name]) => {
                    await app.loadApiJson(graph, name)
                    for (const node of app.graph._nodes) {
                        const at = places[node.id]
                        if (at) { node.pos[0] = at[0]; node.pos[1] = at[1] }
                    }
                    return app.graph.serialize()
                }""",
                [graph, places, name],
            )
            (FOLDER / f"{name}.json").write_text(json.dumps(workflow, indent=2) + "\n", encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main()
