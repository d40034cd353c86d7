"""Messages, options, errors and other data that the parts of holdfast exchange. Pure."""
