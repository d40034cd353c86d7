"""Taking the snapshot folder for a life of the job: rank 0 gets its lease, and all ranks learn what they need of it.

Knows leases and messages between ranks. Must not know what is in the folder.
"""

from __future__ import annotations

import os
import secrets
from typing import Any, NamedTuple

from holdfast.protocol.errors import HoldfastError, SnapshotError, SnapshotFolderError
from holdfast.protocol.train_contract import RUN_ID_VARIABLE
from holdfast.train.agreement import Peers
from holdfast.train.snapshots import lease as leases
from holdfast.train.snapshots.flush import rescue_attempt
from holdfast.train.snapshots.lease import FolderLease
from holdfast.train.snapshots.remote import Location, RemotePath


class TakenFolder(NamedTuple):
    """The snapshot folder of one life of the job, as all ranks know it."""

    path: Location
    lease: FolderLease | None
    """The lease; on rank 0 only."""
    number: int
    """The lease's number; on all ranks."""
    rescue: int
    """The number of the attempt as which the saver writes a state that is only in memory."""
    secret: str
    """A random word of this life, the same on all ranks: copies on other nodes use it (`key_of_life`)."""
    folder_id: str
    """The folder's identity: see LeaseOwner."""
    training_id: str
    """An id for this training, if it begins here: rank 0's HOLDFAST_RUN_ID, or else a random word."""


def take_folder(path: Location, peers: Peers, lease: FolderLease | None, lost: int = 0) -> TakenFolder:
    """Take the folder for this job, on rank 0, unless that has its `lease` already; all ranks call this. `lost`: see
    leases.acquire. Raises SnapshotError."""
    facts: dict[str, Any] = {}
    failure: HoldfastError | None = None
    before = lease
    if peers.rank == 0:
        try:
            run_id, job_uid = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("HOLDFAST_JOB_UID", "")
            lease = lease or leases.acquire(path, run_id, lost=lost, job_uid=job_uid)
            facts = {"number": lease.number, "line": lease.line, "rescue": rescue_attempt()}
            facts |= {"secret": secrets.token_hex(32), "folder_id": lease.folder_id}
            # Without an id from the launcher (the default of --rdzv-id is the same for all jobs) one is made, once:
            # later lives find it in the snapshots.
            facts["training_id"] = os.environ.get(RUN_ID_VARIABLE) or secrets.token_hex(6)
        except HoldfastError as error:
            failure, facts = error, {"error": str(error)}

    try:
        facts = peers.broadcast(facts)
    except BaseException:  # also an interruption: the caller does not know of the new lease, and cannot give it back
        if lease is not None and lease is not before:
            lease.release()
        raise
    if failure is not None:
        raise failure
    if "error" in facts:
        raise SnapshotError(f"rank 0: {facts['error']}")

    try:
        _check_one_folder(path, peers, facts)
    except BaseException:
        if lease is not None and lease is not before:
            lease.release()
        raise
    return TakenFolder(
        path,
        lease,
        int(facts["number"]),
        int(facts["rescue"]),
        str(facts["secret"]),
        str(facts["folder_id"]),
        str(facts["training_id"]),
    )


def _check_one_folder(path: Location, peers: Peers, facts: dict[str, Any]) -> None:
    """Raise SnapshotFolderError, on all ranks, unless all see the lease that rank 0 has taken. In an object store all
    do."""
    if isinstance(path, RemotePath) or peers.world == 1:
        return
    seen = peers.rank == 0 or leases.is_seen(path, facts["number"], facts["line"], leases.SEEN_S)
    answers = peers.all_gather([seen, os.uname().nodename])
    blind = [(rank, host) for rank, (sees, host) in enumerate(answers) if not sees]
    if blind:
        ranks = ", ".join(f"{rank} on {host}" for rank, host in blind[:4]) + (" …" if len(blind) > 4 else "")
        raise SnapshotFolderError(
            f"{path} is not one folder for all ranks: what rank 0 writes there, rank {ranks} cannot see\n"
            "the snapshot folder has to be on a disk that all nodes share, or in an object store"
        )
