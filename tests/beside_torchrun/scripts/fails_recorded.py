"""The same as fails.py, under torch's decorator that writes the error file."""

from fails import main
from torch.distributed.elastic.multiprocessing.errors import record

if __name__ == "__main__":
    record(main)()
