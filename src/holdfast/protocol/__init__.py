"""Pure decisions and the data they work on: no clock, socket, process or randomness in here."""
