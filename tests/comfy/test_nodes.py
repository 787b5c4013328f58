"""The nodes in a real ComfyUI: what they give, and what they say when something is wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from graphs import capture, loaders, prompt, sampler
from host import Graph, GraphError, Host
from safetensors.torch import load_file, save_file


def latent_of(host: Host, graph: Graph) -> torch.Tensor:
    return host.run(graph)["latent"]["samples"]


def models(host: Host, folder: str) -> Path:
    return host.root / "models" / folder


# Conditioning


def test_both_kinds_of_conditioning_give_the_same_bits(host: Host) -> None:
    text = "red (circle:1.3), white background"
    riding = latent_of(host, loaders() | {"p": prompt(text)} | sampler("p"))
    finished = latent_of(host, loaders() | {"p": prompt(text, True)} | sampler("p"))
    assert torch.equal(riding, finished)


def average(strength: float) -> Graph:
    inputs = {"conditioning_to": ["p", 0], "conditioning_from": ["q", 0], "conditioning_to_strength": strength}
    return {"avg": {"class_type": "ConditioningAverage", "inputs": inputs}}


@pytest.mark.parametrize("strength,same_as", [(0.0, "q"), (1.0, "p")])
def test_conditioning_average_means_what_it_says(host: Host, strength: float, same_as: str) -> None:
    graph = loaders() | {"p": prompt("red circle", True), "q": prompt("a blue star at the left", True)}
    mixed = latent_of(host, graph | average(strength) | sampler("avg"))
    assert torch.equal(mixed, latent_of(host, graph | sampler(same_as)))


def test_conditioning_concat_reaches_the_model(host: Host) -> None:
    graph = loaders() | {"p": prompt("red circle", True), "q": prompt("blue star", True)}
    graph["cat"] = {
        "class_type": "ConditioningConcat",
        "inputs": {"conditioning_to": ["p", 0], "conditioning_from": ["q", 0]},
    }
    assert not torch.equal(latent_of(host, graph | sampler("cat")), latent_of(host, graph | sampler("p")))


def test_zero_out_of_a_finished_context_is_zero(host: Host) -> None:
    graph = loaders() | {
        "p": prompt("red circle", True),
        "z": {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["p", 0]}},
    }
    graph["oz"] = capture("z", 0, "zero")
    zero = host.run(graph | sampler("z"))["zero"][0]
    assert zero[0].abs().sum() == 0 and "t5xxl_ids" not in zero[1]
    model = host.run(loaders() | {"om": capture("a", 0, "model")})["model"].model
    conds = model.extra_conds(
        device=torch.device("cpu"), noise=torch.zeros(1, 16, 1, 8, 8), cross_attn=zero[0], **zero[1]
    )
    assert conds["c_crossattn"].cond.abs().sum() == 0


def test_prompt_per_line_is_a_batch_of_prompts(host: Host) -> None:
    graph = loaders()
    graph["p"] = prompt("red circle\n\na blue star at the left", True)
    graph["p"]["inputs"]["prompt_per_line"] = True
    graph["op"] = capture("p", 0, "cond")
    batch = graph | sampler("p")
    batch["lat"]["inputs"]["batch_size"] = 2
    out = host.run(batch)
    assert out["cond"][0][0].shape == (2, 512, tiny.CONFIG.context_dim)
    single = loaders() | {"p": prompt("a blue star at the left", True), "op": capture("p", 0, "cond")}
    assert torch.equal(host.run(single)["cond"][0][0][0], out["cond"][0][0][1])


def test_prompt_per_line_without_a_model_says_what_to_do(host: Host) -> None:
    graph = loaders() | {"p": prompt("a\nb")}
    graph["p"]["inputs"]["prompt_per_line"] = True
    with pytest.raises(GraphError, match="Connect the model"):
        host.run(graph | {"op": capture("p", 0, "cond")})


def anima_model(host: Host) -> Any:
    return host.run(loaders() | {"om": capture("a", 0, "model")})["model"].model


def extra_conds(host: Host, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    with torch.inference_mode():
        out = anima_model(host).extra_conds(
            device=torch.device("cpu"), noise=torch.zeros(1, 16, 1, 8, 8), cross_attn=context, **kwargs
        )
    return out["c_crossattn"].cond


def test_two_rows_of_states_with_one_row_of_ids(host: Host) -> None:
    states, ids = torch.randn(2, 6, 64), torch.tensor([5, 6, 1])
    both = extra_conds(host, states, t5xxl_ids=ids, t5xxl_weights=torch.ones(3))
    assert both.shape[0] == 2
    for row in range(2):
        alone = extra_conds(host, states[row : row + 1], t5xxl_ids=ids)[0]
        torch.testing.assert_close(both[row], alone, rtol=1e-5, atol=1e-5)


def test_states_and_ids_of_different_batches_are_an_error(host: Host) -> None:
    with pytest.raises(Exception, match="different batches"):
        extra_conds(host, torch.randn(3, 6, 64), t5xxl_ids=torch.ones(2, 4, dtype=torch.int))


def test_conditioning_of_a_foreign_encoder_warns_once(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    model = anima_model(host)
    model._warned_foreign = False
    with caplog.at_level(logging.WARNING, "anima"):
        for _ in range(2):
            model.extra_conds(
                device=torch.device("cpu"), noise=torch.zeros(1, 16, 1, 8, 8), cross_attn=torch.randn(1, 5, 48)
            )
    assert sum("without T5 ids" in record.message for record in caplog.records) == 1


def test_finished_context_does_not_warn(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    anima_model(host)._warned_foreign = False
    with caplog.at_level(logging.WARNING, "anima"):
        latent_of(host, loaders() | {"p": prompt("other words", True)} | sampler("p", negative=["p", 0], seed=99))
    assert not [record for record in caplog.records if "without T5 ids" in record.message]


def test_end_token_once_and_empty_prompt_is_not_zeros(host: Host) -> None:
    graph = loaders() | {"p": prompt("(a:1.2) (b:0.8) (c:1.1)"), "q": prompt("")}
    out = host.run(graph | {"o1": capture("p", 0, "p"), "o2": capture("q", 0, "q")})
    ids = out["p"][0][1]["t5xxl_ids"].tolist()
    assert ids.count(1) == 1 and ids[-1] == 1
    states, extra = out["q"][0]
    assert extra["t5xxl_ids"].tolist() == [1] and states.shape[1] == 1 and states.abs().sum() > 0


def test_qwen_states_are_taken_after_the_final_norm(host: Host) -> None:
    clip = host.run(loaders() | {"oc": capture("a", 1, "clip")})["clip"]
    norm = clip.cond_stage_model.qwen3_06b.transformer.model.norm
    states = clip.encode_from_tokens(clip.tokenize("red circle"))
    unit = states / norm.weight.float()
    torch.testing.assert_close(unit.square().mean(-1), torch.ones(unit.shape[:2]), rtol=1e-2, atol=1e-2)


def test_textual_inversion(host: Host) -> None:
    """`embedding:NAME` (native: TypeError): its vectors reach Qwen3, and the T5 stream goes without."""
    folder = models(host, "embeddings")
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(4)
    save_file({"qwen3_06b": torch.randn(3, 64, generator=generator)}, folder / "style.safetensors")
    graph = loaders() | {"p": prompt("red circle, embedding:style"), "q": prompt("red circle, ")}
    out = host.run(graph | {"o1": capture("p", 0, "p"), "o2": capture("q", 0, "q"), "oc": capture("a", 1, "clip")})
    tokens = out["clip"].tokenize("red circle, embedding:style")["qwen3_06b"][0]
    assert sum(torch.is_tensor(token) for token, _ in tokens) == 3 and out["p"][0][0].shape[1] == len(tokens)
    assert out["p"][0][1]["t5xxl_ids"].tolist() == out["q"][0][1]["t5xxl_ids"].tolist()
    assert not torch.equal(latent_of(host, graph | sampler("p")), latent_of(host, graph | sampler("q")))


# Sampling and VAE


def test_model_sampling_sets_the_shift_and_keeps_timestep_scale(host: Host) -> None:
    graph = loaders() | {"p": prompt("red circle")}
    graph["s"] = {"class_type": "AnimaModelSampling", "inputs": {"model": ["a", 0], "shift": 3.0}}
    plain = latent_of(host, graph | sampler("p"))
    assert torch.equal(latent_of(host, graph | sampler("p", model=["s", 0])), plain)
    graph["s"]["inputs"]["shift"] = 1.0
    assert not torch.equal(latent_of(host, graph | sampler("p", model=["s", 0])), plain)


def test_decoder_equals_the_cores_within_its_bound_in_tiles_too(host: Host) -> None:
    graph = loaders() | {"p": prompt("red circle")} | sampler("p", size=136)
    graph["core"] = {"class_type": "VAEDecode", "inputs": {"samples": ["ks", 0], "vae": ["a", 2]}}
    graph["o"] = capture("core", 0, "core")
    for tile in (0, 64):
        graph[f"d{tile}"] = {
            "class_type": "WanVAEDecode",
            "inputs": {"samples": ["ks", 0], "vae": ["a", 2], "tile_size": tile},
        }
        graph[f"o{tile}"] = capture(f"d{tile}", 0, f"ours{tile}")
    out = host.run(graph)
    assert out["core"].shape == (1, 136, 136, 3)
    for tile in (0, 64):
        torch.testing.assert_close(out[f"ours{tile}"], out["core"], rtol=0, atol=1e-5)


def test_encoder_treats_a_batch_as_pictures_not_as_frames(host: Host) -> None:
    """Core's VAEEncode makes one video of a batch in some hosts; ours makes one latent of each picture."""
    vae = host.run(loaders() | {"ov": capture("a", 2, "vae")})["vae"]
    encode = host.module("nodes.vae").encode_images
    pictures = torch.rand(3, 40, 48, 3)
    latents = encode(vae, pictures)
    assert latents.shape == (3, 16, 1, 5, 6)
    for i in range(3):
        with torch.inference_mode():
            expected = vae.encode(pictures[i : i + 1]).reshape(1, 16, 1, 5, 6)
        torch.testing.assert_close(latents[i : i + 1], expected, rtol=0, atol=1e-4)


def test_video_latents_go_the_hosts_way(host: Host) -> None:
    vae = host.run(loaders() | {"ov": capture("a", 2, "vae")})["vae"]
    node = host.nodes.NODE_CLASS_MAPPINGS["WanVAEDecode"]
    latent = torch.randn(1, 16, 3, 4, 4)
    with torch.inference_mode():
        frames, expected = node.execute({"samples": latent}, vae).result[0], vae.decode(latent)[0]
    assert frames.shape == (9, 32, 32, 3) and torch.equal(frames, expected)


def test_out_of_memory_falls_back_to_tiles(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management

    vae = host.run(loaders() | {"ov": capture("a", 2, "vae")})["vae"]
    module, image_vae = host.module("nodes.vae"), host.module("anima.vae").WanImageVAE
    latent = torch.randn(1, 16, 40, 40)
    whole = module.decode_images(vae, latent)
    plain, tiles = image_vae.decode, []

    def decode(self: Any, z: Any, tile: int | None = None, on_tile: Any = None) -> Any:
        tiles.append(tile)
        if tile is None or tile > 64:
            raise comfy.model_management.OOM_EXCEPTION("pretended")
        return plain(self, z, tile, on_tile)

    monkeypatch.setattr(image_vae, "decode", decode)
    torch.testing.assert_close(module.decode_images(vae, latent), whole, rtol=0, atol=1e-5)
    assert tiles == [None, 256, 128, 64]


def test_tile_choice_by_free_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management

    vae = host.run(loaders() | {"ov": capture("a", 2, "vae")})["vae"]
    choose = host.module("nodes.vae")._choose_tile
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_: 1024 * 1024)
    assert choose(vae, lambda h, w: h * w, 4096, 4096, 0) == 1024
    assert choose(vae, lambda h, w: h * w, 1024, 1024, 0) is None
    assert choose(vae, lambda h, w: h * w * 1e9, 512, 512, 0) == 256
    assert choose(vae, lambda h, w: h * w, 4096, 4096, 100) == 96


# Loading


def test_report_says_what_was_loaded(host: Host) -> None:
    report = host.run(loaders())["report"]
    for part in ("an Anima DiT", "3 blocks, width 96", "prefix 'net.'", "F32 x", "LLM adapter: in the file"):
        assert part in report


def test_40_blocks_are_all_loaded(host: Host) -> None:
    from dataclasses import replace

    config = replace(tiny.CONFIG, num_blocks=40)
    save_file(tiny.prefixed(tiny.dit(config), "net."), models(host, "diffusion_models") / "deep.safetensors")
    graph = loaders(unet_name="deep.safetensors") | {"om": capture("a", 0, "model")}
    assert len(host.run(graph)["model"].model.diffusion_model.blocks) == 40


def test_adapter_override(host: Host) -> None:
    folder = models(host, "diffusion_models")
    bare = {name: t for name, t in tiny.dit().items() if not name.startswith("llm_adapter.")}
    save_file(tiny.prefixed(bare, "net."), folder / "bare.safetensors")
    graph: Graph = {
        "u": {"class_type": "AnimaUNetLoader", "inputs": {"unet_name": "bare.safetensors", "weight_dtype": "default", "llm_adapter": "tiny.safetensors"}},
        "o": capture("u", 0, "model"), "r": capture("u", 1, "report"),
    }  # fmt: skip
    out = host.run(graph)
    assert torch.equal(
        out["model"].model.diffusion_model.llm_adapter.out_proj.weight, tiny.dit()["llm_adapter.out_proj.weight"]
    )
    assert "from tiny.safetensors" in out["report"]


def test_model_save_loads_again_with_the_same_bits(host: Host) -> None:
    graph = loaders() | {"p": prompt("red circle")}
    before = latent_of(host, graph | sampler("p"))
    graph["save"] = {"class_type": "ModelSave", "inputs": {"model": ["a", 0], "filename_prefix": "saved"}}
    host.run(graph)
    (path,) = (host.root / "output").glob("saved*.safetensors")
    path.rename(models(host, "diffusion_models") / "saved.safetensors")
    keys = load_file(models(host, "diffusion_models") / "saved.safetensors").keys()
    assert all(key.startswith("model.diffusion_model.") for key in keys)
    assert torch.equal(
        latent_of(host, loaders(unet_name="saved.safetensors") | {"p": prompt("red circle")} | sampler("p")), before
    )


@pytest.mark.parametrize("note", ["", "x", "x" * 8, "x" * 24, "x" * 40])
def test_bits_do_not_depend_on_where_the_header_ends(host: Host, note: str) -> None:
    """CPU kernels round differently on unaligned memory, and a memory-mapped file is rarely aligned."""
    save_file(tiny.prefixed(tiny.dit(), "net."), models(host, "diffusion_models") / "noted.safetensors", {"note": note})
    noted = loaders(unet_name="noted.safetensors") | {"p": prompt("red circle")} | sampler("p", seed=17)
    plain = loaders() | {"p": prompt("red circle")} | sampler("p", seed=17)
    assert torch.equal(latent_of(host, noted), latent_of(host, plain))


def test_second_load_of_a_used_model_keeps_its_weights(host: Host) -> None:
    """Weights of a reused model turned NaN in another port."""
    import comfy.model_management

    graph = loaders() | {"p": prompt("red circle")} | sampler("p")
    first = latent_of(host, graph)
    for _ in range(2):
        comfy.model_management.unload_all_models()
        graph["ks"]["inputs"]["seed"] += 0
        host.executor.reset()
        assert torch.equal(latent_of(host, graph), first) and first.isfinite().all()


def test_replaced_file_is_noticed(host: Host) -> None:
    folder = models(host, "diffusion_models")
    save_file(tiny.prefixed(tiny.dit(), "net."), folder / "changing.safetensors")
    graph = loaders(unet_name="changing.safetensors") | {"p": prompt("red circle")} | sampler("p")
    first = latent_of(host, graph)
    save_file(tiny.prefixed(tiny.dit(seed=77), "net."), folder / "new.safetensors")
    (folder / "new.safetensors").rename(folder / "changing.safetensors")
    assert not torch.equal(latent_of(host, graph), first)


# Errors of the first turn: each its own clear message, and the next prompt runs


def write_bad_files(host: Host) -> None:
    dit, text, vae = models(host, "diffusion_models"), models(host, "text_encoders"), models(host, "vae")
    whole = (dit / "tiny.safetensors").read_bytes()
    (dit / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (dit / "text.safetensors").write_text("this is no model")
    zeros = {
        "sdxl": ["model.diffusion_model.input_blocks.0.0.weight"], "flux": ["double_blocks.0.img_attn.qkv.weight"],
        "wan": ["blocks.0.ffn.0.weight", "patch_embedding.weight"], "lora": ["lora_unet_blocks_0_self_attn_q_proj.lora_down.weight"],
    }  # fmt: skip
    for name, keys in zeros.items():
        save_file({key: torch.zeros(4, 4) for key in keys}, dit / f"{name}.safetensors")
    tensors = tiny.prefixed(tiny.dit(), "net.")
    save_file({n: t for n, t in tensors.items() if "llm_adapter" not in n}, dit / "cosmos.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "net.blocks.1.mlp.layer1.weight"}, dit / "missing.safetensors")
    save_file(tensors | {"net.blocks.1.extra.weight": torch.zeros(1)}, dit / "surplus.safetensors")
    save_file(tensors | {"net.blocks.1.mlp.layer1.weight": torch.zeros(3, 96)}, dit / "shape.safetensors")
    save_file(tiny.text_encoder(), dit / "qwen.safetensors")
    save_file(tensors, text / "dit.safetensors")
    save_file(tensors, vae / "dit.safetensors")
    save_file({n: t for n, t in tiny.text_encoder().items() if "layers.1.mlp" not in n}, text / "missing.safetensors")
    save_file(
        {n: t for n, t in tiny.vae().items() if "decoder.middle.0.residual.2" not in n}, vae / "missing.safetensors"
    )


ERRORS = [
    ("unet_name", "truncated", "cut off"), ("unet_name", "text", "not a safetensors"),
    ("unet_name", "sdxl", "an SDXL"), ("unet_name", "flux", "a Flux"), ("unet_name", "wan", "a Wan video DiT"),
    ("unet_name", "cosmos", "no LLM adapter"), ("unet_name", "lora", "an Anima LoRA"), ("unet_name", "qwen", "a Qwen3"),
    ("unet_name", "missing", "net.blocks.1.mlp.layer1.weight|blocks.1.mlp.layer1.weight"),
    ("unet_name", "surplus", "blocks.1.extra.weight"), ("unet_name", "shape", r"\[3, 96\] instead of"),
    ("clip_name", "dit", "an Anima DiT"), ("vae_name", "dit", "an Anima DiT"),
    ("clip_name", "missing", "layers.1.mlp"), ("vae_name", "missing", "decoder.middle.0.residual.2"),
]  # fmt: skip


@pytest.mark.parametrize("slot,file,said", ERRORS)
def test_wrong_file_is_refused_with_its_reason(host: Host, slot: str, file: str, said: str) -> None:
    write_bad_files(host)
    with pytest.raises(GraphError, match=said) as caught:
        host.run(loaders(**{slot: f"{file}.safetensors"}))
    assert f"{file}.safetensors" in caught.value.message and "What to do" in caught.value.message
    assert "3 blocks" in host.run(loaders())["report"]


def test_missing_file_is_refused_before_the_queue(host: Host) -> None:
    with pytest.raises(GraphError, match="not in"):
        host.run(loaders(unet_name="nothing.safetensors"))


def test_file_removed_after_listing(host: Host) -> None:
    node = host.nodes.NODE_CLASS_MAPPINGS["AnimaUNetLoader"]
    with pytest.raises(Exception, match="not in models/diffusion_models"):
        node.execute("gone.safetensors", "default")


@pytest.mark.parametrize("name", ["../vae/tiny.safetensors", "/etc/passwd", "..\\vae\\tiny.safetensors"])
def test_paths_out_of_the_models_folder_are_refused(host: Host, name: str) -> None:
    node = host.nodes.NODE_CLASS_MAPPINGS["AnimaVAELoader"]
    with pytest.raises(Exception, match="not in models/vae"):
        node.execute(name)


def test_4_channel_latent_into_the_sampler(host: Host) -> None:
    graph = loaders() | {"p": prompt("red circle")} | sampler("p")
    graph["lat"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
    assert latent_of(host, graph).shape == (1, 16, 1, 8, 8), "an empty one is only a size"

    save_file(
        {"latent_tensor": torch.ones(1, 4, 8, 8), "latent_format_version_0": torch.tensor([])},
        host.root / "input" / "sd.latent",
    )
    graph["lat"] = {"class_type": "LoadLatent", "inputs": {"latent": "sd.latent"}}
    with pytest.raises(GraphError, match="4 channels"):
        host.run(graph)


def test_sdxl_vae_in_the_decoder(host: Host) -> None:
    node = host.nodes.NODE_CLASS_MAPPINGS["WanVAEDecode"]

    class Foreign:
        first_stage_model = torch.nn.Identity()
        latent_channels = 4

    with pytest.raises(Exception, match="not the one Anima uses"):
        node.execute({"samples": torch.zeros(1, 16, 1, 4, 4)}, Foreign())
    vae = host.run(loaders() | {"ov": capture("a", 2, "vae")})["vae"]
    with pytest.raises(Exception, match=r"shape \[1, 4, 4, 4\]"):
        node.execute({"samples": torch.zeros(1, 4, 4, 4)}, vae)


def test_finishing_on_a_foreign_model_is_an_error(host: Host) -> None:
    class Foreign:
        model = torch.nn.Identity()

    with pytest.raises(Exception, match="loaded by this pack"):
        host.module("nodes.text").require_anima(Foreign())


# LoRA


def write_lora(host: Host, name: str, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, models(host, "loras") / f"{name}.safetensors")
    return f"{name}.safetensors"


def pair(rows: int, columns: int, rank: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator) / 2, torch.randn(
        rank, columns, generator=generator
    ) / columns**0.5


def with_lora(name: str, strength: float = 1.0) -> Graph:
    inputs = {"model": ["a", 0], "clip": ["a", 1], "lora_name": name, "strength_model": strength, "strength_clip": 1.0}
    return {"lo": {"class_type": "AnimaLoraLoader", "inputs": inputs}, "olo": capture("lo", 2, "lora_report")}


SPELLINGS = [
    "lora_unet_blocks_0_self_attn_q_proj.lora_down.weight", "diffusion_model.blocks.0.self_attn.q_proj.lora_A.weight",
    "net.blocks.0.self_attn.q_proj.lora_A.weight", "blocks.0.self_attn.q_proj.lora_A.weight",
    "transformer.blocks.0.self_attn.q_proj.lora_A.weight", "base_model.model.blocks.0.self_attn.q_proj.lora_A.weight",
    "transformer.transformer_blocks.0.attn1.to_q.lora_A.weight", "transformer_blocks.0.attn1.to_q.lora_A.default.weight",
    "lycoris_blocks_0_self_attn_q_proj.lora_down.weight", "lora_transformer_blocks_0_self_attn_q_proj.lora_down.weight",
    "lora_transformer_transformer_blocks_0_attn1_to_q.lora_down.weight",
]  # fmt: skip


@pytest.mark.parametrize("down_name", SPELLINGS)
def test_every_spelling_is_the_same_lora(host: Host, down_name: str) -> None:
    up, down = pair(96, 96)
    up_name = down_name.replace("lora_down", "lora_up").replace("lora_A", "lora_B")
    name = write_lora(host, "spelling", {down_name: down, up_name: up})
    folder = models(host, "diffusion_models")
    merged = tiny.dit()
    merged["blocks.0.self_attn.q_proj.weight"] = merged["blocks.0.self_attn.q_proj.weight"] + 0.7 * up @ down
    save_file(tiny.prefixed(merged, "net."), folder / "merged.safetensors")
    with_patch = latent_of(
        host, loaders() | with_lora(name, 0.7) | {"p": prompt("red circle")} | sampler("p", model=["lo", 0])
    )
    plain = loaders(unet_name="merged.safetensors") | {"p": prompt("red circle")} | sampler("p")
    torch.testing.assert_close(with_patch, latent_of(host, plain), rtol=1e-4, atol=1e-4)


def test_lora_equals_the_cores_loader_where_core_knows_the_name(host: Host) -> None:
    up, down = pair(384, 96)
    key = "lora_unet_blocks_2_mlp_layer1"
    name = write_lora(
        host, "kohya", {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(2.0)}
    )
    ours = loaders() | with_lora(name, 0.8) | {"p": prompt("red circle")} | sampler("p", model=["lo", 0])
    core = loaders() | {"p": prompt("red circle")} | sampler("p", model=["lo", 0])
    core["lo"] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["a", 0], "lora_name": name, "strength_model": 0.8},
    }
    plain = latent_of(host, loaders() | {"p": prompt("red circle")} | sampler("p"))
    with_ours = latent_of(host, ours)
    assert torch.equal(with_ours, latent_of(host, core)) and not torch.equal(with_ours, plain)
    assert torch.equal(latent_of(host, loaders() | {"p": prompt("red circle")} | sampler("p")), plain), (
        "the model is as before"
    )


def test_lora_on_adapter_and_text_encoder_is_reported(host: Host) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for key, (rows, columns) in {"lora_unet_llm_adapter_blocks_0_self_attn_q_proj": (32, 32), "lora_te_layers_0_mlp_up_proj": (96, 64),
                                 "lora_unet_blocks_1_mlp_layer1": (384, 96)}.items():  # fmt: skip
        tensors[f"{key}.lora_up.weight"], tensors[f"{key}.lora_down.weight"] = pair(rows, columns)
    tensors["lora_unet_nonsense.lora_up.weight"] = torch.zeros(2, 2)
    name = write_lora(host, "groups", tensors)
    report = host.run(loaders() | with_lora(name))["lora_report"]
    for part in ("DiT 2", "LLM adapter 2", "text encoder 2", "lora_unet_nonsense", "not applied (1)"):
        assert part in report, report


LORA_ERRORS = {
    "sdxl": ({"lora_unet_down_blocks_0_attentions_0.lora_down.weight": torch.zeros(4, 4)}, "SDXL"),
    "flux": ({"diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": torch.zeros(4, 4)}, "a Flux LoRA"),
    "wan": ({"diffusion_model.blocks.0.ffn.0.lora_A.weight": torch.zeros(4, 4)}, "a Wan video LoRA"),
    "nan": ({"lora_unet_blocks_0_mlp_layer1.lora_up.weight": torch.full((384, 4), float("nan")),
             "lora_unet_blocks_0_mlp_layer1.lora_down.weight": torch.zeros(4, 96)}, "not numbers"),
    "shape": ({"lora_unet_blocks_0_mlp_layer1.lora_up.weight": torch.zeros(64, 4),
               "lora_unet_blocks_0_mlp_layer1.lora_down.weight": torch.zeros(4, 96)}, r"\[64, 96\] does not fit the model's \[384, 96\]"),
    "rank": ({"lora_unet_blocks_0_mlp_layer1.lora_up.weight": torch.zeros(384, 8),
              "lora_unet_blocks_0_mlp_layer1.lora_down.weight": torch.zeros(4, 96)}, "ranks differ"),
    "half": ({"lora_unet_blocks_0_mlp_layer1.lora_up.weight": torch.zeros(384, 8)}, "incomplete, without .lora_down.weight"),
    "empty": ({}, "without tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", LORA_ERRORS)
def test_wrong_lora_is_refused_with_its_reason(host: Host, case: str) -> None:
    tensors, said = LORA_ERRORS[case]
    name = write_lora(host, f"bad_{case}", tensors)
    with pytest.raises(GraphError, match=said):
        host.run(loaders() | with_lora(name))


# The host


def test_pack_imports_under_a_mangled_name_without_the_repo_on_the_path() -> None:
    """In a process of its own, exactly as ComfyUI imports packs; core's own `nodes` stays core's."""
    import os
    import subprocess
    import sys

    from host import REPO, comfyui_path

    code = f"""
import sys, asyncio
sys.path.insert(0, {str(comfyui_path())!r})
sys.argv = ["main.py", "--cpu"]
import comfy.options; comfy.options.enable_args_parsing()
import nodes
assert {str(REPO)!r} not in sys.path
assert asyncio.run(nodes.load_custom_node({str(REPO)!r}))
assert "AnimaUNetLoader" in nodes.NODE_CLASS_MAPPINGS and nodes.__file__.startswith({str(comfyui_path())!r})
assert {str(REPO)!r} not in sys.path
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", env={**os.environ, "PYTHONPATH": ""})


def test_interrupt_stops_a_tiled_decode(host: Host) -> None:
    import comfy.model_management

    import nodes

    vae = host.run(loaders() | {"ov": capture("a", 2, "vae")})["vae"]
    nodes.interrupt_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        host.module("nodes.vae").decode_images(vae, torch.randn(1, 16, 24, 24), 64)
    assert host.module("nodes.vae").decode_images(vae, torch.randn(1, 16, 24, 24), 64).shape == (1, 192, 192, 3)


def test_trace_logs_every_stage_and_step(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ANIMA_TRACE", "1")
    with caplog.at_level(logging.INFO, "anima"):
        host.run(loaders() | {"p": prompt("red circle")} | sampler("p"), fresh=True)
    monkeypatch.delenv("ANIMA_TRACE")
    lines = [record.message for record in caplog.records if record.message.startswith("Anima trace")]
    stages = {line.split(": ")[1].split(", ")[1] for line in lines}
    assert stages == {"adapter rows", "patch embedding", "timestep embedding", "block 0 output", "block 1 output",
                      "block 2 output", "final layer"}  # fmt: skip
    assert any(line.startswith("Anima trace: forward 2, block 1 output: [") and "nan 0" in line for line in lines)
    host.executor.reset()
    untraced = anima_model(host).diffusion_model
    assert not any(module._forward_hooks for module in untraced.modules()), "off, it must cost nothing"


# Presets


def test_preset_connects_to_ksampler_and_tells_the_variant(host: Host) -> None:
    tensors = {"lora_unet_blocks_0_mlp_layer1.lora_up.weight": torch.zeros(384, 2),
               "lora_unet_blocks_0_mlp_layer1.lora_down.weight": torch.zeros(2, 96)}  # fmt: skip
    turbo = write_lora(host, "anima-turbo-lora", tensors)

    def run(model: str, variant: str = "auto") -> dict[str, Any]:
        preset = {"pr": {"class_type": "AnimaPreset", "inputs": {"model": [model, 0], "variant": variant}}}
        names = ("steps", "cfg", "sampler_name", "scheduler")
        settings = {name: ["pr", index] for index, name in enumerate(names)}
        negative: Graph = {"neg": prompt("")}
        negative["neg"]["inputs"]["text"] = ["pr", 5]
        graph = (
            loaders() | with_lora(turbo) | preset | {"p": prompt("red")} | sampler("p", model=[model, 0], **settings)
        )
        return host.run(graph | negative | {"ov": capture("pr", 6, "variant"), "oc": capture("pr", 1, "cfg")})

    assert run("a")["variant"] == "base" and run("a")["cfg"] == 4.0
    assert run("lo")["variant"] == "turbo" and run("lo")["cfg"] == 1.0
    assert run("lo", "aesthetic")["variant"] == "aesthetic" and run("a")["latent"]["samples"].isfinite().all()
