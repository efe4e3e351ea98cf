"""Wire formats of tensors: safetensors, npy, npz and JSON."""
