"""torch's own @record: rank 1 raises."""

import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is a pineapple")
    time.sleep(60)


if __name__ == "__main__":
    main()
