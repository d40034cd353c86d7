"""The product's machines in virtual time: clock, network, one shell, drawn and scripted worlds, checkers."""
