"""The flow schedule and a few samplers, for use without ComfyUI.

sigma runs from 1 (noise) to 0 (picture), bent by a shift. A sampler is a pure function of a denoiser, the noisy
latent and the sigmas; with the same seed it follows ComfyUI's sampler of the same name bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from .errors import InputError

SHIFT = 3.0
SCHEDULE_STEPS = 1000

Number = TypeVar("Number", float, Tensor)
Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(noisy latent (B, ...), sigma ()) -> prediction of the clean latent."""
StepCallback = Callable[[int, Tensor, Tensor], None]
"""(step, noisy latent, clean prediction), after each model call."""
NoiseSource = Callable[[], Tensor]


def flow_shift(t: Number, shift: float = SHIFT) -> Number:
    """Bend linear time t in [0, 1] towards the noisy end: shift * t / (1 + (shift - 1) * t)."""
    if shift == 1.0:
        return t
    return shift * t / (1 + (shift - 1) * t)


def simple_schedule(steps: int, shift: float = SHIFT, denoise: float = 1.0) -> Tensor:
    """ComfyUI's `simple` scheduler: evenly spaced entries of a table of 1000 sigmas, then 0.

    Args:
        steps: Number of model steps.
        denoise: Below 1 keeps only the last steps of a proportionally longer schedule.

    Returns:
        float32 (steps + 1,), descending, with 0 only at the end.
    """
    if steps < 1 or not 0 < denoise <= 1:
        raise InputError(
            "This schedule is not possible.",
            found=f"{steps} steps, denoise {denoise}",
            expected="at least 1 step, denoise above 0 and at most 1",
        )
    total = steps if denoise > 0.9999 else int(steps / denoise)
    table = flow_shift(torch.arange(1, SCHEDULE_STEPS + 1) / SCHEDULE_STEPS, shift)
    stride = len(table) / total
    sigmas = [float(table[-(1 + int(i * stride))]) for i in range(total)]
    return torch.tensor([*sigmas, 0.0])[-(steps + 1) :]


def euler(
    denoise: Denoiser, x: Tensor, sigmas: Tensor, noise: NoiseSource, on_step: StepCallback, shift: float
) -> Tensor:
    """First-order integration of the flow."""
    for i in range(len(sigmas) - 1):
        clean = denoise(x, sigmas[i])
        on_step(i, x, clean)
        x = x + (x - clean) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
    return x


def dpmpp_2m(
    denoise: Denoiser, x: Tensor, sigmas: Tensor, noise: NoiseSource, on_step: StepCallback, shift: float
) -> Tensor:
    """DPM-Solver++(2M), Lu et al. 2022, arXiv:2211.01095, in t = -log sigma."""
    previous: Tensor | None = None
    for i in range(len(sigmas) - 1):
        clean = denoise(x, sigmas[i])
        on_step(i, x, clean)
        t, t_next = sigmas[i].log().neg(), sigmas[i + 1].log().neg()
        h = t_next - t
        target = clean
        if previous is not None and sigmas[i + 1] > 0:
            r = (t - sigmas[i - 1].log().neg()) / h
            target = (1 + 1 / (2 * r)) * clean - (1 / (2 * r)) * previous
        x = (t_next.neg().exp() / t.neg().exp()) * x - (-h).expm1() * target
        previous = clean
    return x


def _er_noise(x: Tensor) -> Tensor:
    return x * ((x**0.3).exp() + 10.0)


def er_sde(
    denoise: Denoiser, x: Tensor, sigmas: Tensor, noise: NoiseSource, on_step: StepCallback, shift: float
) -> Tensor:
    """Extended reverse-time SDE solver of third order, Cui et al. 2023, arXiv:2309.06169."""
    points = torch.arange(0, 200.0, dtype=torch.float32, device=x.device)
    if sigmas[0] >= 1:  # the signal-to-noise ratio at sigma 1 is 0: start a hair below
        sigmas = sigmas.clone()
        sigmas[0] = flow_shift(1.0 - 1e-4, shift)
    lambdas = sigmas.logit().exp()
    previous = previous_slope = None
    for i in range(len(sigmas) - 1):
        clean = denoise(x, sigmas[i])
        on_step(i, x, clean)
        if sigmas[i + 1] == 0:
            return clean
        now, then = lambdas[i], lambdas[i + 1]
        alpha_now, alpha_then = sigmas[i] / now, sigmas[i + 1] / then
        r_alpha, r = alpha_then / alpha_now, _er_noise(then) / _er_noise(now)
        x = r_alpha * r * x + alpha_then * (1 - r) * clean
        if previous is not None:
            dt = then - now
            size = -dt / 200.0
            position = then + points * size
            scaled = _er_noise(position)
            integral = torch.sum(1 / scaled) * size
            slope = (clean - previous) / (now - lambdas[i - 1])
            x = x + alpha_then * (dt + integral * _er_noise(then)) * slope
            if previous_slope is not None:
                integral_u = torch.sum((position - now) / scaled) * size
                curve = (slope - previous_slope) / ((now - lambdas[i - 2]) / 2)
                x = x + alpha_then * ((dt**2) / 2 + integral_u * _er_noise(then)) * curve
            previous_slope = slope
        x = x + alpha_then * noise() * 1.0 * (then**2 - now**2 * r**2).sqrt().nan_to_num(nan=0.0)
        previous = clean
    return x


SAMPLERS = {"euler": euler, "dpmpp_2m": dpmpp_2m, "er_sde": er_sde}


def seeded_noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """The starting noise ComfyUI makes for a seed: float32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step_noise(like: Tensor, seed: int) -> NoiseSource:
    """Noise for stochastic samplers, as ComfyUI seeds it (one above the seed on the CPU)."""
    generator = torch.Generator(like.device).manual_seed(seed + (like.device.type == "cpu"))
    return lambda: torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
