"""What runs inside a worker process; standard library only."""
