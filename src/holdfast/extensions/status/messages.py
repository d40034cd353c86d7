"""The subject of the question `status`, and its answer, a JobView that fits into a frame."""

from __future__ import annotations

import msgspec

from holdfast.protocol.rank_progress import JobView

ANSWER_BYTES_MAX = 3 * 1024 * 1024
"""Limit of the answer (bytes). It leaves room in a frame."""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The subject of the question. It is empty, because the whole job is shown."""


def body_of(view: JobView) -> bytes:
    """Encode a view. If the job is so large that it does not fit into a frame, the ranks are left out, and a notice
    says so: else it would look as if no rank had begun."""
    body = msgspec.json.encode(view)
    if len(body) > ANSWER_BYTES_MAX:
        nodes = tuple(msgspec.structs.replace(node, ranks=()) for node in view.nodes)
        ranks = sum(len(node.ranks) for node in view.nodes)
        notices = (*view.notices, f"{ranks} ranks are too many for one answer: their steps are not shown")
        body = msgspec.json.encode(msgspec.structs.replace(view, nodes=nodes, notices=notices))
    return body
