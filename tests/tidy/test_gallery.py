"""The pictures of docs/gallery.md: what is drawn of a job, and that those in the repository are small."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.gallery import KILLED_AT, Dot, course_picture, loss_picture

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
BYTES_MAX = 20_000
SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def test_the_loss_has_a_curve_of_each_life_and_says_where_the_second_began() -> None:
    calm = [Dot(0, step, 1 / step) for step in range(1, 11)]
    killed = [*calm[:6], *(Dot(1, step, 1 / step) for step in range(5, 11))]
    picture = ElementTree.fromstring(loss_picture(calm, killed, 6))
    curves = [each.attrib["points"].split() for each in picture.iter(f"{SVG}polyline")]
    assert [len(each) for each in curves] == [10, 6, 6]
    assert curves[0] == [*curves[1][:4], *curves[2]], "equal losses are at one place"
    assert any(each.endswith("from step 5 on") for each in texts(picture))


def test_the_course_is_as_long_as_its_stretches_and_names_the_verdict_of_each_generation() -> None:
    times = [("startup", 10, 14), ("training", 14, 20), ("down", 20, 22), ("training", 22, 30)]
    stretches = [{"doing": doing, "from_epoch_s": begin, "to_epoch_s": end} for doing, begin, end in times]
    generations = [
        {"generation": 1, "began_epoch_s": 10, "why": ""},
        {"generation": 2, "began_epoch_s": 20, "why": "rank 0 failed on a"},
    ]
    report = {"history": {"stretches": stretches, "effective": 0.7}, "generations": generations}
    picture = ElementTree.fromstring(course_picture({**report, "causes": {1: "rank 3 on b (local 1) raised <Error>"}}))
    widths = [float(each.attrib["width"]) for each in picture.iter(f"{SVG}rect") if each.attrib["height"] == "28"]
    assert [round(each / widths[0], 1) for each in widths] == [1.0, 1.5, 0.5, 2.0]
    assert "generation 2, at 10.0 s: after rank 3 on b raised <Error>" in texts(picture)


@pytest.mark.parametrize("name", ["loss-over-a-kill", "three-failures"])
def test_a_picture_of_a_real_job_is_small_and_whole(name: str) -> None:
    data = (PICTURES / f"{name}.svg").read_bytes()
    assert len(data) < BYTES_MAX
    said = " ".join(texts(ElementTree.fromstring(data)))
    expected = {"loss-over-a-kill": f"rank 1 is killed after step {KILLED_AT}", "three-failures": "generation 4"}
    assert expected[name] in said
