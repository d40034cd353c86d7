"""A compiled model: start → third step with an empty `--cache-dir`, and with the kernels that the first run has kept."""

from __future__ import annotations

from benchmarks.gpu.measuring import FOLDER, launched, note


def main() -> None:
    caches = FOLDER / "caches"
    taken = {}
    for name in ("empty", "kept"):
        flags = ["--standalone", "--nproc-per-node", "1", "--cache-dir", str(caches)]
        with launched("holdfast", flags, "compiled.py") as job:
            job.end()
            taken[name] = job.stamps("third")["0"] - job.began_s
        note(f"start → third step, {name} folder", taken[name], "s")
    note("kept beside empty", taken["kept"] / taken["empty"], "×")
    note("size of the folder", sum(each.stat().st_size for each in caches.rglob("*") if each.is_file()) / 2**20, "MiB")


if __name__ == "__main__":
    main()
