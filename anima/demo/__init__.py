"""The bundled demo model: a tiny Anima, ours, that draws coloured shapes. See docs/demo-model.md."""
