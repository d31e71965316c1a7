"""Whole processes side by side: zckpt against `cp`, the engine's own scripts and bare Python."""
