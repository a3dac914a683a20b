"""`coadjoint bench`: ours against torch.nn, double-backward loops and JAX, in one run."""
