"""The extensions: one folder for each, with the same file names in each. `holdfast.extension_list` lists them."""
