"""What a training script needs; the only package that imports torch."""
