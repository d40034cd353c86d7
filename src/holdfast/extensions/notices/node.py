"""`--notify URL|COMMAND`: reports the job's turns to people: start, restart, hang, straggler, lost node, end.

A listener of the journal makes a notice of each turn; sender.py sends it. Only the node of the coordinator does. Only
the end of the job waits for it, for at most CLOSE_S_MAX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.detached import run_detached
from holdfast.extensions.notices.sender import Notice, Sender
from holdfast.runtime.node_extension import Node, NodeExtension, Send
from holdfast.text import listed, plural

NOBODY_FAILED = "HF200"
"""Code of a verdict that names no failure."""


class Notices:
    """Makes notices for people from the journal's events. One per agent."""

    def __init__(self, run_id: str, node: str, send: Callable[[Notice], None]) -> None:
        self._about = {"run_id": run_id, "host": node}
        self._send = send
        self._leads = False
        """The coordinator has formed a generation here, or has it from the coordinator before."""
        self._over = False
        """The job is over: members that leave now are not lost."""
        self._world = ""
        """The size of the newest world, in words."""
        self._why: Mapping[str, Any] = {}
        """Fields of the event that gives the reason for the next generation; empty: there was none."""

    def heard(self, event: str, fields: Mapping[str, Any]) -> None:
        """Handle an event of the journal."""
        match event:
            case "coordinator.assigned" | "coordinator.regroup_begun":
                self._world = f"{plural(fields['world_size'], 'rank')} on {plural(len(fields['order']), 'node')}"
                if not self._why and "text" in fields:
                    self._why = fields
            case "coordinator.started" if not self._leads:
                self._leads = True
                self._send_notice("start", f"started: {self._world}", fields)
            case "coordinator.started" | "coordinator.regrouped":
                why = self._why.get("cause") or self._why.get("text", "")
                self._send_notice(
                    "restart", f"generation {fields['generation']}, {self._world}: {why}", {**self._why, **fields}
                )
                self._why = {}
            case "coordinator.verdict" if fields["code"] != NOBODY_FAILED:
                self._why = fields
            case "coordinator.stopping" | "coordinator.draining" if not self._why:
                self._why = fields
            case "coordinator.drain_to" if fields.get("save") or not fields["safe_point"]:
                self._why = {}  # nothing ends: the workers save and go on, or they are let go
            case "coordinator.hang" if fields["kind"] in ("hung", "stuck"):
                self._send_notice("hang", f"hangs: {fields['text']}", fields)
            case "coordinator.straggler":
                times = (
                    f"{fields['own_s'] * 1e3:.0f} ms of its own per step, its peers {fields['peers_s'] * 1e3:.0f} ms"
                )
                self._send_notice(
                    "straggler", f"slow: {fields['host']}, rank {listed(fields['ranks'])}: {times}", fields
                )
            case "leads" if not fields["founds"]:
                self._leads, self._why = True, {"text": "this node has the coordinator now"}
            case "coordinator.resumed":
                self._leads, self._why = True, {}
            case "coordinator.steps_down":
                self._leads = False
            case "coordinator.over":
                self._over = True
            case "coordinator.lost" if not self._over:
                host = str(fields["member"]).partition("#")[0]
                self._send_notice("lost_node", f"lost node {host}: {fields['reason']}", fields)
            case "ended" if self._leads:
                why = fields.get("cause") or fields["text"]
                self._send_notice(
                    "end", f"{fields['kind']}, exit code {fields['exit_code']}{f': {why}' if why else ''}", fields
                )

    def _send_notice(self, what: str, text: str, fields: Mapping[str, Any]) -> None:
        more = {name: fields[name] for name in ("generation", "code", "advice", "kind", "exit_code") if name in fields}
        code = f" ({fields['code']})" if fields.get("code") else ""
        self._send(
            {
                "text": f"{self._about['run_id']}: {text}{code}",
                "event": what,
                "time": time.time(),
                **self._about,
                **more,
            }
        )


class OnNode(NodeExtension):
    def __init__(self, node: Node, send: Send) -> None:
        super().__init__(node, send)
        self._sender = Sender(node.options.notify, lambda to, why: self.node.write("notice_lost", to=to, why=why))
        node.listen(Notices(node.run_id, node.host, self._sender.send).heard)

    async def reported(self) -> None:
        await run_detached(self._sender.close)
