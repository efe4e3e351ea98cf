"""Tensors on the wire: safetensors, npy and npz, JSON, with their dtypes and checked shapes."""
