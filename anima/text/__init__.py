"""From a prompt to what the DiT's adapter needs: weights, the two token streams, Qwen3 hidden states."""
