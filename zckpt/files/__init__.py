"""Containers: where tensors lie in files of torch.save, safetensors, HDF5 and `.distcp`.

A container gives values and the extents of tensors, and writes shells; what they mean is a format's
business.
"""
