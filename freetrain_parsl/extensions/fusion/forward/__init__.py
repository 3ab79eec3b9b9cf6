"""The fused forward pass, and its checks."""
