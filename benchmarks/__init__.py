"""Compares complete processes: zckpt against `cp`, the engines' converters and bare Python."""
