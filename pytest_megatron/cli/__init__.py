"""The `pytest-megatron` command."""
