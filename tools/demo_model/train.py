"""Train the demo model from scratch on the CPU: the VAE first, then the DiT with its adapter.

    python tools/demo_model/train.py --out anima/demo/weights.safetensors

`--smoke` runs every step a few times to prove that the script works. Needs torch, transformers, safetensors,
Pillow and tokenizer files (COMFYUI_PATH or ANIMA_TOKENIZERS).
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pictures import caption, draw, random_scene
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anima.adapter import LLMAdapter
from anima.demo.files import DIT_CONFIG, new_vae, rule, t5_table, text_encoder_tensors
from anima.operations import sdpa
from anima.sampling import flow_shift
from anima.text.qwen3 import load_qwen3
from anima.text.tokenizers import PromptTokens, find_tokenizers
from anima.transformer import AnimaTransformer
from anima.vae import LATENT_CHANNELS, LATENTS_MEAN, LATENTS_STD, WanImageVAE, normalize

SEED = 20260101
PROMPT_DROPOUT = 0.1
CONTEXT_ROWS = 512


def log(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", flush=True)


def pictures(count: int, rng: random.Random) -> tuple[Tensor, list[str]]:
    """uint8 pictures (count, 3, 128, 128) and one caption each."""
    images, captions = [], []
    for _ in range(count):
        scene = random_scene(rng)
        images.append(torch.from_numpy(np.array(draw(scene, rng))).permute(2, 0, 1))
        captions.append(caption(scene, rng))
    return torch.stack(images), captions


def to_range(images: Tensor) -> Tensor:
    return images.float() / 127.5 - 1


def train_vae(images: Tensor, steps: int, batch: int) -> WanImageVAE:
    """Autoencode 64-pixel crops with L1; a little latent noise keeps the decoder smooth."""
    vae = new_vae().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    start = time.time()
    for step in range(steps):
        index = torch.randint(len(images), (batch,))
        y, x = torch.randint(0, 65, (2,)).tolist()
        crop = to_range(images[index, :, y : y + 64, x : x + 64]).contiguous(memory_format=torch.channels_last)
        latent = _encode(vae, crop)
        noisy = latent + 0.05 * torch.randn_like(latent)
        loss = F.l1_loss(_decode(vae, noisy), crop) + 1e-3 * latent.square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            log(f"vae step {step} loss {loss.item():.4f} ({(time.time() - start) / (step + 1):.2f} s/step)")
    return vae


def _encode(vae: WanImageVAE, image: Tensor) -> Tensor:
    return vae.conv1(vae.encoder.global_stage(vae.encoder.local_stage(image))).chunk(2, dim=1)[0]


def _decode(vae: WanImageVAE, latent: Tensor) -> Tensor:
    return vae.decoder.local_stage(vae.decoder.global_stage(vae.conv2(latent)))


@torch.no_grad()
def give_wan_statistics(vae: WanImageVAE, images: Tensor) -> None:
    """Rescale the latent space, through the 1x1 convolutions at its border, to Wan's means and deviations."""
    latents = torch.cat([_encode(vae, to_range(chunk)) for chunk in images.split(32)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3)).clamp_min(1e-3)
    scale = torch.tensor(LATENTS_STD) / std
    offset = torch.tensor(LATENTS_MEAN) - mean * scale
    vae.conv1.weight[:LATENT_CHANNELS] *= scale[:, None, None, None]
    vae.conv1.bias[:LATENT_CHANNELS] = vae.conv1.bias[:LATENT_CHANNELS] * scale + offset
    vae.conv2.bias -= vae.conv2.weight[..., 0, 0] @ (offset / scale)
    vae.conv2.weight /= scale[None, :, None, None]


@torch.no_grad()
def encode_captions(captions: list[str]) -> dict[str, tuple[Tensor, PromptTokens]]:
    """Qwen3 states (M, 128) and tokens of each distinct caption, the empty one included."""
    tokenize = find_tokenizers()
    qwen = load_qwen3(text_encoder_tensors())
    tokens = {text: tokenize(text) for text in {*captions, ""}}
    by_length: dict[int, list[str]] = {}
    for text, prompt in tokens.items():
        by_length.setdefault(len(prompt.qwen), []).append(text)
    out = {}
    for texts in by_length.values():
        for start in range(0, len(texts), 256):
            group = texts[start : start + 256]
            states = qwen(input_ids=torch.tensor([tokens[text].qwen for text in group])).last_hidden_state
            out |= {text: (states[i].clone(), tokens[text]) for i, text in enumerate(group)}
    return out


class PaddedCrossAttention:
    """Attention in which the context's zero padding to 512 rows is one row counted 512 - n times: exact and fast."""

    mask: Tensor | None = None

    def __call__(self, q, k, v, heads, mask=None, transformer_options=None) -> Tensor:
        use = self.mask is not None and k.shape[2] == self.mask.shape[-1]
        return sdpa(q, k, v, heads, mask=self.mask if use else None)


class FrozenAdapter:
    """The adapter's answers computed once for each prompt, for training that leaves the adapter as it is."""

    @torch.no_grad()
    def __init__(self, adapter: LLMAdapter, prompts: Iterable[tuple[Tensor, PromptTokens]]):
        self.rows = {tuple(p.t5): adapter(states[None], torch.tensor([p.t5]))[0] for states, p in prompts}

    def __call__(self, states: Tensor, ids: Tensor) -> Tensor:
        return torch.stack([self.rows[tuple(prompt)] for prompt in ids.tolist()])


def contexts(adapter: LLMAdapter | FrozenAdapter, prompts: list[tuple[Tensor, PromptTokens]]) -> tuple[Tensor, Tensor]:
    """Adapter rows, zero-padded to the longest prompt plus one row, and the mask that stands for 512 rows."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (states, tokens) in enumerate(prompts):
        groups.setdefault((len(states), len(tokens.t5)), []).append(i)
    longest = max(length for _, length in groups) + 1
    longest += longest == 64  # must differ from the number of image tokens, which tells the attentions apart
    rows = torch.zeros(len(prompts), longest, DIT_CONFIG.context_dim)
    mask = torch.full((len(prompts), 1, 1, longest), -math.inf)
    for (_, length), members in groups.items():
        states = torch.stack([prompts[i][0] for i in members])
        ids = torch.tensor([prompts[i][1].t5 for i in members])
        out = adapter(states, ids)
        index = torch.tensor(members)
        rows = rows.index_put((index[:, None], torch.arange(length)[None]), out)
        mask[index, :, :, :length] = 0
        mask[index, :, :, length] = math.log(CONTEXT_ROWS - length)
    return rows, mask


def initialise(model: AnimaTransformer) -> None:
    """The usual DiT initialisation; the adapter's output norm gets gains of mixed sign and size."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter) if "norm" in name else nn.init.zeros_(parameter)
        elif "embed.weight" not in name:
            nn.init.xavier_uniform_(parameter)
    for block in model.blocks:
        for layer in (block.adaln_modulation_self_attn, block.adaln_modulation_cross_attn, block.adaln_modulation_mlp):
            nn.init.zeros_(layer[2].weight)
    nn.init.zeros_(model.t_embedder[1].linear_2.weight)
    nn.init.zeros_(model.final_layer.adaln_modulation[2].weight)
    nn.init.zeros_(model.final_layer.linear.weight)
    model.llm_adapter.norm.weight.data = rule("llm_adapter.norm.weight", (DIT_CONFIG.context_dim,), 1.5)
    model.llm_adapter.embed.weight.data = t5_table(torch.tensor([0]), torch.zeros(1, DIT_CONFIG.context_dim))


def fresh_adapter(model: AnimaTransformer) -> None:
    """Make the adapter near the identity on T5's embeddings, so that all words differ as much as their embeddings.

    Trained along with the DiT from the start, it learns colours first and then tells no shapes apart.
    """
    for name, parameter in model.llm_adapter.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            nn.init.xavier_uniform_(parameter, 0.5 if name.endswith(("o_proj.weight", "mlp.2.weight")) else 1.0)
        elif parameter.ndim == 1 and name != "norm.weight":
            nn.init.ones_(parameter) if "norm" in name else nn.init.zeros_(parameter)
    for block in model.blocks:  # sharper attention to words beside the many rows of padding
        for norm in (block.cross_attn.q_norm, block.cross_attn.k_norm):
            nn.init.constant_(norm.weight, 1.5)


def train_dit(
    latents: Tensor,
    captions: list[str],
    steps: int,
    batch: int,
    start_from: dict[str, Tensor] | None,
    new_adapter: bool,
    save: Callable[[dict[str, Tensor]], None],
) -> None:
    """Rectified flow on normalised latents (N, 16, 16, 16); saves the averaged weights, at the end and on the way.

    Args:
        start_from: Weights of an earlier run to go on from; its adapter is kept as it is, which saves time.
        new_adapter: With `start_from`, put a fresh adapter in the place of the earlier one.
    """
    attention = PaddedCrossAttention()
    model = AnimaTransformer(DIT_CONFIG, attention=attention)
    initialise(model)
    if start_from is not None:
        table = t5_table(start_from["t5_used"], start_from.pop("dit.llm_adapter.embed.rows").float())
        weights = {k.removeprefix("dit."): v.float() for k, v in start_from.items() if k.startswith("dit.")}
        model.load_state_dict({**weights, "llm_adapter.embed.weight": table})
        if new_adapter:
            fresh_adapter(model)
        model.llm_adapter.requires_grad_(False)
    average = copy.deepcopy(model.state_dict())
    encoded = encode_captions(captions)
    log(f"dit: {sum(p.numel() for p in model.parameters()):,} parameters, {len(encoded)} captions")
    adapter: LLMAdapter | FrozenAdapter = model.llm_adapter
    if start_from is not None:
        adapter = FrozenAdapter(model.llm_adapter, encoded.values())
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01, betas=(0.9, 0.99)
    )
    start, running = time.time(), 0.0
    for step in range(steps):
        progress = step / steps
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        index = torch.randint(len(latents), (batch,)).tolist()
        prompts = [encoded["" if random.random() < PROMPT_DROPOUT else captions[i]] for i in index]
        clean, noise = latents[index], torch.randn(batch, *latents.shape[1:])
        sigma = flow_shift(torch.rand(batch).clamp_min(1e-4), 3.0 if random.random() < 0.5 else 1.0)
        s = sigma[:, None, None, None]
        rows, attention.mask = contexts(adapter, prompts)
        velocity = model((1 - s) * clean + s * noise, sigma, rows)
        loss = F.mse_loss(velocity, noise - clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.998, (step + 1) / (step + 20))
        with torch.no_grad():
            for key, value in model.state_dict().items():
                average[key].lerp_(value, 1 - decay)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0:
            log(f"dit step {step} loss {running:.4f} ({(time.time() - start) / (step + 1):.2f} s/step)")
        if step % 400 == 399:
            save(_trained(average, encoded))
    log(f"dit finished after {steps} steps, loss {running:.4f}")
    save(_trained(average, encoded))


def _trained(average: dict[str, Tensor], encoded: dict[str, tuple[Tensor, PromptTokens]]) -> dict[str, Tensor]:
    """The weights to keep: of the embedding table only the rows that captions use."""
    used = sorted({i for _, tokens in encoded.values() for i in tokens.t5})
    table = average["llm_adapter.embed.weight"]
    out = {"dit." + key: value for key, value in average.items() if value is not table}
    return out | {"dit.llm_adapter.embed.rows": table[used], "t5_used": torch.tensor(used, dtype=torch.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    parser.add_argument("--pictures", type=int, default=14000)
    parser.add_argument("--vae-steps", type=int, default=1500)
    parser.add_argument("--dit-steps", type=int, default=2000)
    parser.add_argument("--vae", type=Path, help="take the VAE from this file of an earlier run")
    parser.add_argument("--start-from", type=Path, help="go on from the DiT and VAE of this file, keeping its adapter")
    parser.add_argument(
        "--fresh-adapter", action="store_true", help="with --start-from: replace the adapter, then keep it"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.smoke:
        args.pictures, args.vae_steps, args.dit_steps = 64, 5, 8
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    random.seed(SEED)
    images, captions = pictures(args.pictures, random.Random(SEED))
    log(f"{len(images)} pictures drawn")
    earlier = load_file(args.start_from) if args.start_from else None
    if args.vae or earlier:
        tensors = load_file(args.vae) if args.vae else earlier
        vae = new_vae()
        vae.load_state_dict(
            {k.removeprefix("vae."): v.float() for k, v in tensors.items() if not k.startswith(("dit.", "t5_"))}
        )
    else:
        vae = train_vae(images, args.vae_steps, batch=16)
        give_wan_statistics(vae, images[:512])
    with torch.no_grad():
        test = to_range(images[:64])
        error = F.l1_loss(_decode(vae, _encode(vae, test)), test).item()
        log(f"vae finished, mean absolute error {error:.4f} on [-1, 1]")
        latents = torch.cat([normalize(_encode(vae, to_range(chunk))) for chunk in images.split(64)])
    log(f"latents: mean {latents.mean():.3f} std {latents.std():.3f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, args.out.with_suffix(".vae"))
    weights = {"vae." + key: value for key, value in vae.state_dict().items()}

    def save(trained: dict[str, Tensor]) -> None:
        stored = {k: (v if k == "t5_used" else v.bfloat16()).contiguous() for k, v in (weights | trained).items()}
        save_file(stored, args.out)
        log(f"wrote {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")

    train_dit(latents, captions, args.dit_steps, args.batch, earlier, args.fresh_adapter, save)


if __name__ == "__main__":
    main()
