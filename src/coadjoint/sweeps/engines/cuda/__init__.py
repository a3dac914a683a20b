"""Engine `cuda`: persistent kernels on an NVIDIA GPU, made from the cell's formula by NVRTC."""
