"""Benchmarks of complete processes: zckpt beside `cp`, the engines' converters and bare Python."""
