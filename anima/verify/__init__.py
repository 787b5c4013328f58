"""Step-by-step proof: every stage of our port beside a reference, the first that differs named.

`recording` runs the stages of any side in one order, `ours`, `with_comfyui` and `with_diffusers` are the sides,
`report` compares two recordings.
"""
