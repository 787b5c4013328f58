"""Against diffusers' own modules on the same weights: within 1e-4 relative in fp32."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from anima.checkpoint.layouts import dit_layout
from anima.transformer import AnimaTransformer
from anima.vae import load_image_vae

diffusers = pytest.importorskip("diffusers")
CONFIG = tiny.CONFIG


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape and theirs.std() > 0.01
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def diffusers_transformer() -> torch.nn.Module:
    from diffusers import CosmosTransformer3DModel

    return CosmosTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=CONFIG.num_heads, attention_head_dim=CONFIG.head_dim,
        num_layers=CONFIG.num_blocks, mlp_ratio=CONFIG.mlp_dim / CONFIG.model_dim, text_embed_dim=CONFIG.context_dim,
        adaln_lora_dim=CONFIG.adaln_lora_dim, max_size=(128, 240, 240), patch_size=(1, 2, 2), rope_scale=(1.0, 4.0, 4.0),
        concat_padding_mask=True, extra_pos_embed_type=None,
    ).eval()  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 16, 1, 8, 8), (2, 16, 1, 12, 6), (1, 16, 3, 8, 4)])
def test_dit_is_cosmos_transformer_3d(shape: tuple[int, ...]) -> None:
    theirs = diffusers_transformer()
    sd = tiny.dit()
    layout = dit_layout(tiny.module_shapes(theirs))
    assert layout is not None and layout.name == "diffusers"
    theirs.load_state_dict({key: sd[name] for key, name in layout.rename.items()}, strict=True)
    ours = AnimaTransformer(CONFIG)
    ours.load_state_dict(sd, strict=True)
    x, t = torch.randn(shape), torch.rand(shape[0])
    context = torch.randn(shape[0], 512, CONFIG.context_dim)
    with torch.no_grad():
        expected = theirs(
            hidden_states=x, timestep=t, encoder_hidden_states=context, return_dict=False,
            padding_mask=torch.zeros(1, 1, *shape[-2:]),
        )[0]  # fmt: skip
        assert_close(ours(x, t, context), expected)


def test_adapter_is_anima_text_conditioner() -> None:
    from diffusers import AnimaTextConditioner

    config = CONFIG.adapter
    assert config is not None
    theirs = AnimaTextConditioner(
        source_dim=config.source_dim, target_dim=config.target_dim, model_dim=config.model_dim,
        num_layers=config.num_blocks, num_attention_heads=config.num_heads, target_vocab_size=config.vocab_size,
    ).eval()  # fmt: skip
    sd = tiny.dit()
    inner = {name.removeprefix("llm_adapter."): t for name, t in sd.items() if name.startswith("llm_adapter.")}
    theirs.load_state_dict(inner, strict=True)
    ours = AnimaTransformer(CONFIG)
    ours.load_state_dict(sd)
    states, ids = torch.randn(2, 9, config.source_dim), torch.randint(0, config.vocab_size, (2, 7))
    with torch.no_grad():
        assert_close(ours.preprocess_text_embeds(states, ids), theirs(states, ids))


def test_vae_is_autoencoder_kl_qwen_image() -> None:
    from diffusers import AutoencoderKLQwenImage
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    theirs = AutoencoderKLQwenImage(base_dim=tiny.VAE.dim).eval()
    sd = tiny.vae()
    theirs.load_state_dict(convert_wan_vae_to_diffusers(dict(sd)), strict=True)
    ours = load_image_vae(sd)
    latent = torch.randn(1, 16, 6, 8)
    with torch.no_grad():
        expected = theirs.decode(latent.unsqueeze(2)).sample.squeeze(2)
        assert_close(ours.decode(latent).clamp(-1, 1), expected)
        picture = expected.clamp(-1, 1)
        assert_close(ours.encode(picture), theirs.encode(picture.unsqueeze(2)).latent_dist.mode().squeeze(2))
