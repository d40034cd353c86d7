"""torch's own @record: rank 1 raises."""

import os
import signal

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is a pineapple")
    signal.pause()  # until it is stopped


if __name__ == "__main__":
    main()
