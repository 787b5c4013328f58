"""ComfyUI entry point. ComfyUI imports this folder under a name of its own, so every import is relative."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """Called by ComfyUI (V3 schema) to get the extension with its nodes."""
    from .nodes import AnimaExtension

    return AnimaExtension()
