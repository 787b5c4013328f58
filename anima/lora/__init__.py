"""LoRA files: finding the module behind every spelling of its name, and applying or merging the deltas."""
