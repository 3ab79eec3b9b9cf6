"""The fused step: members meet, one computes for all."""
