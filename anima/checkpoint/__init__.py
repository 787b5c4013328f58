"""Reading model files: headers, what a file is, and how its tensors are named."""
