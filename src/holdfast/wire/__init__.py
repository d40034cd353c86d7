"""Bytes to messages and back, without a socket."""
