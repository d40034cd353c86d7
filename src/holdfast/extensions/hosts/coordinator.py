"""Sends the agents of one host away, keeps a host out for a time, or lets it take part again. Pure."""

from __future__ import annotations

import msgspec

from holdfast.extensions.hosts.messages import About
from holdfast.protocol.extension import (
    AnswerRequest,
    CoordinatorExtension,
    Exclude,
    Orders,
    Readmit,
    RefuseRequest,
    SendAway,
    Sent,
    UserRequest,
)
from holdfast.protocol.policy import Note


class AtCoordinator(CoordinatorExtension):
    questions = {"drain": About, "exclude": About, "readmit": About}

    def asked(self, now: float, request: UserRequest) -> Orders:
        host, for_s, by = request.about.host, request.about.for_s, request.by
        there = [member for member in self.job.members() if member.host == host]
        answer = AnswerRequest(request.number, msgspec.json.encode(Sent(len(there))))
        if request.question == "readmit":
            if not there and not self.job.keeps_out(host, now):
                # A host name with a typing error would leave the right host excluded, and nobody would know.
                return [RefuseRequest(request.number, f"{host} is not excluded, and no node of this job is on it")]
            return [answer, Note("readmitted", {"host": host, "by": by}), Readmit(host)]
        if not there:
            return [RefuseRequest(request.number, f"no node of this job is on {host}")]
        if any(member.hosts_coordinator for member in there):
            return [RefuseRequest(request.number, f"{host} has the job's coordinator: only `holdfast stop` ends it")]
        if request.question == "drain":
            return [answer, Note("drain_asked", {"host": host, "by": by}), SendAway(host, by)]
        excluded = Note("excluded", {"host": host, "for_s": for_s, "by": by})
        text = f"{host} is excluded for {for_s:g} s by {by}"
        return [answer, excluded, Exclude(host, for_s, text), SendAway(host, by)]
