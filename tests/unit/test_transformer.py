"""The port on its own: shapes, padding, and regressions of faults other ports had."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from anima.adapter import finish_context
from anima.rope import axis_frequencies, rope_table, rotate
from anima.sampling import flow_shift
from anima.transformer import AnimaTransformer, timestep_features


@pytest.fixture(scope="module")
def model() -> AnimaTransformer:
    model = AnimaTransformer(tiny.CONFIG)
    model.load_state_dict(tiny.dit(), strict=True)
    return model.requires_grad_(False).eval()


def run(model: AnimaTransformer, shape: tuple[int, ...], **kwargs: object) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator)
    context = finish_context(torch.randn(shape[0], 9, tiny.CONFIG.context_dim, generator=generator))
    return model(x, torch.full((shape[0],), 0.7), context, **kwargs)


@pytest.mark.parametrize(
    "shape", [(1, 16, 8, 8), (2, 16, 9, 7), (1, 16, 1, 135, 3), (1, 16, 3, 5, 4), (3, 16, 1, 1, 1)]
)
def test_output_has_the_input_shape(model: AnimaTransformer, shape: tuple[int, ...]) -> None:
    out = run(model, shape)
    assert out.shape == shape and out.isfinite().all() and out.std() > 0.1


def test_4d_and_5d_latents_agree(model: AnimaTransformer) -> None:
    assert torch.equal(run(model, (2, 16, 6, 8)), run(model, (2, 16, 1, 6, 8)).squeeze(2))


def test_batch_rows_do_not_mix(model: AnimaTransformer) -> None:
    x, t = torch.randn(2, 16, 6, 6), torch.tensor([0.9, 0.2])
    context = torch.randn(2, 512, tiny.CONFIG.context_dim)
    both = model(x, t, context)
    for row in range(2):
        alone = model(x[row : row + 1], t[row : row + 1], context[row : row + 1])
        torch.testing.assert_close(both[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_odd_latents_use_a_ceil_patch_grid(model: AnimaTransformer) -> None:
    """135 latent rows (1080 px) are 68 token rows, not 67."""
    seen: list[Tensor] = []

    def look(args: dict) -> dict:
        seen.append(args["img"])
        return args

    run(model, (1, 16, 1, 135, 4), transformer_options={"patches": {"post_input": [look]}})
    assert seen[0].shape[1:4] == (1, 68, 2)


def test_rope_ratio_4_is_there() -> None:
    """Without it the velocity is off by some per cent: height and width turn slower than time."""
    plain, scaled = axis_frequencies(40, 1.0), axis_frequencies(40, 4.0)
    assert scaled[0] == plain[0] == 1 and (scaled[1:] < plain[1:]).all()
    dims = rope_table(1, 5, 7, 128, (1.0, 4.0, 4.0))
    assert dims.shape == (35, 64, 2, 2)
    assert not torch.allclose(dims, rope_table(1, 5, 7, 128, (1.0, 1.0, 1.0)))


def test_rope_rotates_split_halves() -> None:
    table = rope_table(1, 1, 3, 12, (1.0, 4.0, 4.0))[None, :, None]
    x = torch.zeros(1, 3, 1, 12)
    x[..., 4] = 1.0  # pairs with 4 + 6 = 10, never with 5
    turned = rotate(x, table)
    assert set(turned.nonzero()[:, -1].tolist()) <= {4, 10}
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_timestep_features_put_cosines_first() -> None:
    features = timestep_features(torch.tensor([[0.0]]), 8)
    assert features.tolist() == [[[1, 1, 1, 1, 0, 0, 0, 0]]]


def test_adapter_norm_follows_the_projection(model: AnimaTransformer) -> None:
    """norm(out_proj(x)): with unit gains every row has unit mean square."""
    adapter = model.llm_adapter
    gain = adapter.norm.weight.clone()
    adapter.norm.weight.data.fill_(1.0)
    rows = adapter(torch.randn(1, 6, 64), torch.randint(0, 32128, (1, 5)))
    adapter.norm.weight.data.copy_(gain)
    torch.testing.assert_close(rows.square().mean(-1), torch.ones(1, 5), rtol=1e-3, atol=1e-3)


def test_context_is_padded_to_512_and_never_truncated() -> None:
    assert finish_context(torch.ones(1, 3, 4)).shape == (1, 512, 4)
    assert finish_context(torch.ones(1, 3, 4))[:, 3:].abs().sum() == 0
    assert finish_context(torch.ones(1, 700, 4)).shape == (1, 700, 4)


def test_padding_rows_take_part_in_attention(model: AnimaTransformer) -> None:
    """The model was trained so; masking the zeros would change the picture."""
    x, t = torch.randn(1, 16, 6, 6), torch.tensor([0.5])
    rows = torch.randn(1, 9, tiny.CONFIG.context_dim)
    assert not torch.allclose(model(x, t, finish_context(rows)), model(x, t, rows), atol=1e-3)


def test_fp16_keeps_the_residual_stream_in_fp32() -> None:
    model = AnimaTransformer(tiny.CONFIG, dtype=torch.float16)
    model.load_state_dict(tiny.dit(dtype=torch.float16))
    seen: list[torch.dtype] = []
    model.blocks[1].register_forward_hook(lambda _, args, out: seen.extend([args[0].dtype, out.dtype]))
    context = torch.randn(1, 512, tiny.CONFIG.context_dim).half()
    out = model(torch.randn(1, 16, 1, 4, 4).half(), torch.tensor([0.5]), context)
    assert seen == [torch.float32, torch.float32] and out.dtype == torch.float16


def test_block_replacement_and_output_patches_act(model: AnimaTransformer) -> None:
    plain = run(model, (1, 16, 4, 4))
    skip = {"patches_replace": {"dit": {("double_block", 1): lambda args, extra: args}}}
    same = {"patches_replace": {"dit": {("single_block", 1): lambda args, extra: extra["original_block"](args)}}}
    zero = {"patches": {"attn1_output_patch": [lambda out, extra: out * 0]}}
    assert torch.equal(run(model, (1, 16, 4, 4), transformer_options=same), plain)
    for options in (skip, zero):
        assert not torch.allclose(run(model, (1, 16, 4, 4), transformer_options=options), plain, atol=1e-3)


def test_flow_shift() -> None:
    assert flow_shift(1.0) == 1.0 and flow_shift(0.0) == 0.0 and flow_shift(0.5, 3.0) == 0.75
