"""The Wan 2.1 latent space as a ComfyUI latent format, from the constants of `anima.vae`."""

import comfy.latent_formats
import torch

from ..anima.vae import LATENT_CHANNELS, LATENTS_MEAN, LATENTS_STD, PREVIEW_BIAS, PREVIEW_FACTORS, TAESD_DECODER


class AnimaLatentFormat(comfy.latent_formats.Wan21):
    """Latents (B, 16, T, H/8, W/8); a Wan21, so that nodes which ask for that class recognise it."""

    latent_channels = LATENT_CHANNELS
    latent_dimensions = 3
    latent_rgb_factors = [list(row) for row in PREVIEW_FACTORS]
    latent_rgb_factors_bias = list(PREVIEW_BIAS)

    def __init__(self):
        super().__init__()
        shape = (1, LATENT_CHANNELS, 1, 1, 1)
        self.latents_mean = torch.tensor(LATENTS_MEAN).view(shape)
        self.latents_std = torch.tensor(LATENTS_STD).view(shape)
        self.taesd_decoder_name = TAESD_DECODER
