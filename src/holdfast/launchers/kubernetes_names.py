"""Checks of values for a manifest (names, amounts, volumes) by the rules of Kubernetes' server. PURE.

The functions raise ValueError with the problem; the caller knows the option.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LABEL_CHARS_MAX = 63
SUBDOMAIN_CHARS_MAX = 253
POD_SUFFIX_CHARS = 6
"""Length of the suffix `-xxxxx` in the name of each pod."""

HOST_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
IMAGE = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/)?"  # registry
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[A-Za-z0-9+._-]+:[0-9a-fA-F]{32,})?"
)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
KEY_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
SOURCES = ("pvc", "configmap", "secret")


@dataclass(frozen=True)
class Volume:
    """A claim, an object or a folder that every pod mounts."""

    kind: str
    """`pvc`, `configmap`, `secret` or `host`."""
    name: str
    """Name of the claim or object; for `host`, the folder on the node."""
    path: str
    """Absolute path of the mount in the container."""
    read_only: bool


def job_name(text: str, last_pod: str) -> str:
    """Check the name of a job and its service, which is part of host names. `last_pod`: the longest pod's suffix.

    >>> job_name("llama-70b", "-15")
    'llama-70b'
    """
    if not HOST_LABEL.fullmatch(text):
        raise ValueError(
            "must be lower-case letters, digits and dashes, with a letter first and no dash last (RFC 1123)"
        )
    longest = LABEL_CHARS_MAX - len(last_pod) - POD_SUFFIX_CHARS
    if len(text) > longest:
        raise ValueError(f"{len(text)} characters; with the suffix of the pods' names at most {longest} are possible")
    return text


def name_from(script: str) -> str:
    """A job's name from the name of a script or module.

    >>> name_from("src/Train_GPT.py"), name_from("pkg.train"), name_from("7.py")
    ('train-gpt', 'pkg-train', 'job-7')
    """
    stem = script.rstrip("/").rpartition("/")[2].removesuffix(".py")
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".strip("-")
    return name[:40].rstrip("-")


def label(text: str) -> str:
    """Check a namespace's name."""
    if not LABEL.fullmatch(text) or len(text) > LABEL_CHARS_MAX:
        raise ValueError("must be lower-case letters, digits and dashes, 63 at most (RFC 1123)")
    return text


def subdomain(text: str) -> str:
    """Check a name by the rule for most other objects."""
    if not all(LABEL.fullmatch(part) for part in text.split(".")) or len(text) > SUBDOMAIN_CHARS_MAX:
        raise ValueError("must be lower-case letters, digits, dashes and dots (RFC 1123)")
    return text


def image(text: str) -> str:
    if not IMAGE.fullmatch(text):
        raise ValueError("is not an image; write [REGISTRY/]name[:TAG][@sha256:DIGEST], the name in lower case")
    return text


def cpus(text: str) -> str:
    """Check a number of CPUs: `8`, `0.5` or `500m`."""
    found = AMOUNT.fullmatch(text)
    if not found or found[2] not in (None, "m") or float(found[1]) == 0:
        raise ValueError("must be a number of CPUs, as in 8, 0.5 or 500m")
    if len(found[1].partition(".")[2]) > (0 if found[2] else 3):
        raise ValueError("must be a multiple of 0.001 CPU")
    return text


def size(text: str) -> str:
    """Check an amount of memory: `64Gi`, `500M`."""
    found = AMOUNT.fullmatch(text)
    if not found or found[2] == "m":
        raise ValueError("must be a size, as in 64Gi or 500M")
    if found[2] is None:  # valid for Kubernetes, and hardly what anybody wants
        raise ValueError(f"means {text} bytes; write the unit, as in {text}Gi")
    if float(found[1]) == 0:
        raise ValueError("must be above 0")
    return text


def resource(text: str) -> str:
    """Check the resource name of GPUs: `nvidia.com/gpu`."""
    domain, slash, name = text.partition("/")
    if not slash or not KEY_NAME.fullmatch(name):
        raise ValueError("must be DOMAIN/NAME, as in nvidia.com/gpu")
    subdomain(domain)
    return text


def pair(text: str) -> tuple[str, str]:
    """Read a label, `KEY=VALUE`; its key may have a domain before a slash.

    >>> pair("kueue.x-k8s.io/queue-name=team-a")
    ('kueue.x-k8s.io/queue-name', 'team-a')
    """
    key, equals, value = text.partition("=")
    domain, slash, name = key.rpartition("/")
    if not equals:
        raise ValueError("must be KEY=VALUE")
    if slash:
        subdomain(domain)
    for part in (name, *([value] if value else [])):
        if not KEY_NAME.fullmatch(part) or len(part) > LABEL_CHARS_MAX:
            raise ValueError(
                f"{part!r} must be letters, digits, dashes, dots or underscores, {LABEL_CHARS_MAX} at most"
            )
    return key, value


def variable(text: str) -> tuple[str, str]:
    """Read a variable of the environment, `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not VARIABLE.fullmatch(name):
        raise ValueError("must be NAME=VALUE, the name of letters, digits and underscores")
    if not equals:
        raise ValueError(f"has no value; write {name}=VALUE, or --env-from secret/NAME for a secret")
    return name, value


def source(text: str) -> tuple[str, str]:
    """Read `secret/NAME` or `configmap/NAME`, an object all of whose keys become variables."""
    kind, _, name = text.partition("/")
    if kind not in ("secret", "configmap") or not name:
        raise ValueError("must be secret/NAME or configmap/NAME")
    return kind, subdomain(name)


def volume(text: str) -> Volume:
    """Read `SOURCE:/PATH[:ro]`; SOURCE is a claim, pvc/CLAIM, configmap/NAME, secret/NAME, or /a/folder/of/the/node.

    >>> volume("data:/mnt/data:ro").kind, volume("/raid:/raid").kind, volume("secret/k:/keys").name
    ('pvc', 'host', 'k')
    """
    what, colon, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not colon or not path.startswith("/") or mode not in ("", "ro", "rw"):
        raise ValueError("must be SOURCE:/PATH or SOURCE:/PATH:ro")
    if ".." in (*what.split("/"), *path.split("/")):
        raise ValueError("a path must not contain ..")
    if not path.rstrip("/"):
        raise ValueError("would hide the whole image")
    path = path.rstrip("/")
    if what.startswith("/"):
        return Volume("host", what, path, mode == "ro")
    kind, slash, name = what.partition("/")
    if not slash:
        kind, name = "pvc", what
    if kind not in SOURCES:
        raise ValueError(f"{what!r} must be CLAIM, {', '.join(f'{each}/NAME' for each in SOURCES)} or a folder")
    return Volume(kind, subdomain(name), path, mode == "ro")


def folder(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("must be an absolute path, as in /workspace")
    return text


def user(text: str) -> tuple[int, int]:
    """Read the numbers in `UID[:GID]`; the group's is the user's by default."""
    first, colon, second = text.partition(":")
    numbers = (first, second if colon else first)
    if not all(number.isascii() and number.isdecimal() for number in numbers) or int(first) == 0:
        raise ValueError("must be the numbers UID or UID:GID, and not root")
    return int(numbers[0]), int(numbers[1])
