"""Every built-in node that works on native Anima works on ours, with the same bits. See runner.py for the format."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from host import REPO, Host
from PIL import Image
from safetensors.torch import save_file

_spec = importlib.util.spec_from_file_location("conformance_runner", Path(__file__).with_name("runner.py"))
assert _spec is not None and _spec.loader is not None
runner = importlib.util.module_from_spec(_spec)
import sys  # noqa: E402

sys.modules["conformance_runner"] = runner
_spec.loader.exec_module(runner)


def lora(names: dict[str, tuple[int, int]], down: str, up: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, (rows, columns) in names.items():
        out[name + down] = torch.randn(4, columns, generator=generator) / columns**0.5
        out[name + up] = torch.randn(rows, 4, generator=generator) / 2
    return out


class NativeClipLoader:
    """V1 node: the text encoder as ComfyUI itself builds it, on tiny dimensions."""

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"clip_name": ("STRING", {})}}

    def run(self, clip_name: str) -> tuple[Any]:
        import comfy.sd
        import comfy.supported_models_base
        import comfy.text_encoders.anima
        import comfy.text_encoders.hunyuan_video
        import comfy.utils
        import folder_paths

        sd = comfy.utils.load_torch_file(folder_paths.get_full_path("text_encoders", clip_name))
        target = comfy.supported_models_base.ClipTarget(
            comfy.text_encoders.anima.AnimaTokenizer,
            comfy.text_encoders.anima.te(**comfy.text_encoders.hunyuan_video.llama_detect(sd)),
        )
        dims = {name: size for name, size in tiny.QWEN.items() if name != "head_dim"}
        clip = comfy.sd.CLIP(
            target, parameters=comfy.utils.calculate_parameters(sd), state_dict=[sd],
            model_options={"qwen3_06b_model_config": dims},
        )  # fmt: skip
        return (clip,)


@pytest.fixture(scope="module")
def prepared(host: Host) -> Host:
    import native

    native.NativeLoader.config = tiny.CONFIG
    host.nodes.NODE_CLASS_MAPPINGS |= {
        "TestNativeLoader": native.NativeLoader,
        "TestNativeClipLoader": NativeClipLoader,
    }
    models = host.root / "models"
    save_file(tiny.prefixed(tiny.dit(seed=31), "net."), models / "diffusion_models" / "other.safetensors")
    save_file(tiny.text_encoder(seed=32), models / "text_encoders" / "other.safetensors")
    kohya = {"lora_unet_blocks_0_self_attn_q_proj": (96, 96), "lora_unet_blocks_1_cross_attn_v_proj": (96, 48),
             "lora_unet_llm_adapter_blocks_0_mlp_0": (128, 32), "lora_te_layers_0_mlp_up_proj": (96, 64)}  # fmt: skip
    names = {"diffusion_model.blocks.2.mlp.layer1": (384, 96), "diffusion_model.final_layer.linear": (64, 96)}
    save_file(lora(kohya, ".lora_down.weight", ".lora_up.weight", 1), models / "loras" / "kohya.safetensors")
    save_file(lora(names, ".lora_A.weight", ".lora_B.weight", 2), models / "loras" / "comfy_names.safetensors")
    (models / "model_patches").mkdir(exist_ok=True)
    for channels in (3, 4):
        save_file(tiny.lllite(channels), models / "model_patches" / f"lllite{channels}.safetensors")
    picture = np.full((48, 64, 4), 255, np.uint8)
    picture[10:30, 20:50] = (220, 30, 30, 0)
    Image.fromarray(picture).save(host.root / "input" / "picture.png")
    return host


def test_conformance(prepared: Host) -> None:
    """Runs all cases and writes the table; COMPATIBILITY_TABLE names a file to write it to."""
    only = os.environ.get("CONFORMANCE_CASES", "")
    results = [runner.run_case(prepared, case) for case in runner.load_cases(prepared) if only in case.name]
    text = runner.table(results)
    target = Path(os.environ.get("COMPATIBILITY_TABLE", REPO / ".local" / "compatibility.md"))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(text)
    assert only or len(results) >= 150
    wrong = [f"{r.case}: {r.detail}" for r in results if r.verdict == "wrong"]
    assert not wrong, "\n".join(wrong)
