"""Trainers that people have, inside a session: Hugging Face's Trainer and Accelerate."""
