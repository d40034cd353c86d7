"""`holdfast drain`, `exclude` and `readmit`: which hosts take part."""
