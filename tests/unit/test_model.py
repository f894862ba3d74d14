"""Values: frozen, compared by content, printed in full."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from hutch.errors import CommandError
from hutch.model import Limits, Mount, Network, Outcome, Policy, Result, Source, Value

RESULT_KEYS = {
    "outcome",
    "exit_code",
    "signal",
    "stdout",
    "stderr",
    "truncated",
    "dropped_bytes",
    "duration_ms",
    "state_lost",
    "session",
    "env",
    "source",
    "enforced",
    "files",
    "limits_hit",
    "protected",
    "reported",
    "unsafe",
}


class Point(Value):
    x: int
    y: int = 0


def test_fields_are_the_annotated_names_in_order() -> None:
    assert Point.fields_ == ("x", "y")
    assert (Point.template_, Point.required_) == ({"x": None, "y": 0}, {"x"})


def test_a_default_stands_in_for_a_missing_field() -> None:
    assert Point(x=1).y == 0


def test_a_value_cannot_be_changed() -> None:
    point = Point(x=1)
    with pytest.raises(AttributeError, match=r"frozen; use replace\(x="):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="frozen"):
        point.z = 2  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="frozen"):
        del point.x
    assert point == Point(x=1)


def test_values_are_equal_by_content_and_type() -> None:
    class Other(Value):
        x: int
        y: int = 0

    assert Point(x=1, y=0) == Point(y=0, x=1)
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Other(x=1)
    assert Point(x=1) != (1, 0)


def test_equal_values_hash_alike_however_they_were_written() -> None:
    assert len({Point(x=1, y=2), Point(y=2, x=1), Point(x=1).replace(y=2)}) == 1
    assert hash(Policy(mounts=(Mount(host_path="/a", guest_path="/a"),))) == hash(
        Policy(mounts=(Mount(guest_path="/a", host_path="/a"),))
    )


def test_replace_leaves_the_original_alone() -> None:
    point = Point(x=1)
    assert point.replace(y=5) == Point(x=1, y=5)
    assert point == Point(x=1)


def test_the_repr_is_the_expression_that_makes_it() -> None:
    assert repr(Point(x=1, y=2)) == "Point(x=1, y=2)"
    assert eval(repr(Limits()), {"Limits": Limits}) == Limits()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Point needs x"),
        ({"y": 1}, "Point needs x"),
        ({"x": 1, "z": 1}, "Point has no z"),
        ({"x": 1, "z": 1, "w": 1}, "Point has no z, w"),
    ],
)
def test_missing_and_unknown_fields_are_named(values: dict[str, int], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Point(**values)


def test_replace_refuses_an_unknown_field() -> None:
    with pytest.raises(TypeError, match="Limits has no memory"):
        Limits().replace(memory=1)


def test_fields_are_given_by_keyword() -> None:
    with pytest.raises(TypeError):
        Point(1)  # type: ignore[misc]


@pytest.mark.parametrize("value", [Limits(), Policy(network=Network.FULL), Result(outcome=Outcome.OK, exit_code=0)])
def test_a_value_survives_copying_and_pickling(value: Value) -> None:
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


# ---- Result ---------------------------------------------------------------------------------------------------------


def result(outcome: Outcome = Outcome.OK, exit_code: int | None = 0, **values: object) -> Result:
    return Result(outcome=outcome, exit_code=exit_code, **values)


def test_only_the_outcome_ok_is_ok() -> None:
    assert [outcome for outcome in Outcome if result(outcome).ok] == [Outcome.OK]


def test_check_returns_a_good_result_itself() -> None:
    good = result()
    assert good.check() is good


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.OK])
def test_check_raises_what_the_outcome_says(outcome: Outcome) -> None:
    bad = result(outcome, None, stderr="x" * 5000 + "the end")
    with pytest.raises(CommandError) as caught:
        bad.check()
    assert caught.value.code == f"command.{outcome.value}"
    assert bad.explain() in caught.value.message
    assert caught.value.details.endswith("the end")
    assert len(caught.value.details) <= 2000
    assert caught.value.hint


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (result(), "it ended normally"),
        (result(Outcome.FAILED, 3), "exit code 3"),
        (result(Outcome.FAILED, None, signal="SIGSEGV"), "ended by SIGSEGV"),
        (result(Outcome.TIMEOUT, None), "stopped at the time limit"),
        (result(Outcome.MEMORY, None), "stopped at the memory limit"),
        (result(Outcome.PIDS, 1), "it could not start more processes (exit code 1)"),
        (result(Outcome.DISK, None), "stopped at the disk limit"),
        (result(Outcome.OUTPUT, None), "stopped at the output limit"),
        (result(Outcome.KILLED, None), "it was killed"),
    ],
)
def test_explain_is_one_sentence(value: Result, sentence: str) -> None:
    assert value.explain() == sentence


def test_the_json_of_a_result_has_exactly_the_promised_keys() -> None:
    assert set(result().to_json()) == RESULT_KEYS


def test_the_json_of_a_result_holds_plain_values_only() -> None:
    value = result(
        Outcome.TIMEOUT,
        None,
        limits_hit=("timeout",),
        enforced=(("memory", "tree"),),
        source=Source.NIX,
        unsafe=("network_host",),
        files=("a",),
    )
    read_back = json.loads(json.dumps(value.to_json()))
    assert read_back == value.to_json()
    assert Result.from_json(read_back) == value
    assert read_back["outcome"] == "timeout"
    assert read_back["exit_code"] is None
    assert read_back["source"] == "nix"
    assert read_back["enforced"] == {"memory": "tree"}
    assert read_back["limits_hit"] == ["timeout"]
    assert read_back["truncated"] is False
