"""`holdfast status`: the job as its coordinator sees it, with the figures of all extensions."""
