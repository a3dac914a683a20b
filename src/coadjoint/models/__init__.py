"""What to do with a trained network: export it."""
