"""A node is checked by a command of the user before each generation (--health-command), and parked if that fails."""
