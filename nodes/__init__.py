"""The nodes. One module per kind of node; each is thin, the work is done in `anima`."""

from comfy_api.latest import ComfyExtension, io

from .loaders import AnimaLoader, AnimaTextEncoderLoader, AnimaUNetLoader, AnimaVAELoader
from .lora import AnimaLoraAdvanced, AnimaLoraLoader, AnimaLoraStack
from .merge import AnimaModelMerge
from .presets import AnimaPreset
from .sampling import AnimaEmptyLatent, AnimaModelSampling
from .text import Qwen3AdapterTextEncode
from .vae import WanVAEDecode, WanVAEEncode


class AnimaExtension(ComfyExtension):
    """What `comfy_entrypoint` returns."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            AnimaLoader,
            AnimaUNetLoader,
            AnimaTextEncoderLoader,
            AnimaVAELoader,
            AnimaLoraLoader,
            AnimaLoraStack,
            AnimaLoraAdvanced,
            AnimaModelMerge,
            Qwen3AdapterTextEncode,
            AnimaModelSampling,
            AnimaPreset,
            AnimaEmptyLatent,
            WanVAEDecode,
            WanVAEEncode,
        ]
