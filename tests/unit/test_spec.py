"""Requests, right and wrong, through every door: keywords, flags, TOML and JSON meet in one schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hutch import config, spec
from hutch.cli import build_parser, run
from hutch.errors import HostError, HutchError, SpecError
from hutch.model import Limits, Mount, Network, Source, Spec, Unsafe

MIB = 1024 * 1024


def from_flags(*words: str) -> Spec:
    return run._spec(build_parser("run").parse_args([*words, "pass"]))


def from_toml(text: str) -> Spec:
    return spec.parse(config.parse_settings(text.encode(), "f").request("python"))


def refusal(request: Any, where: str = "") -> HutchError:
    with pytest.raises(HutchError) as caught:
        spec.parse(request, where)
    assert caught.value.hint
    return caught.value


# ---- the doors ------------------------------------------------------------------------------------------------------

SAME = [
    ({"pids": 7}, ["--pids", "7"], "pids = 7"),
    ({"cpus": 0.5}, ["--cpus", "0.5"], "cpus = 0.5"),
    ({"memory_mb": 2048}, ["--memory", "2G"], "memory_mb = 2048"),
    ({"tmp_mb": 64}, ["--tmp", "64M"], "tmp_mb = 64"),
    ({"max_output_mb": 3}, ["--max-output", "3"], "max_output_mb = 3"),
    ({"timeout_seconds": 2.5}, ["--timeout", "2.5"], "timeout_seconds = 2.5"),
    ({"timeout_seconds": None}, ["--timeout", "none"], 'timeout_seconds = "none"'),
    ({"network": "full"}, ["--network", "full"], 'network = "full"'),
    ({"mounts": ["/a:/b:rw"]}, ["--mount", "/a:/b:rw"], 'mounts = [{host = "/a", guest = "/b", writable = true}]'),
    ({"project": "/a"}, ["--project", "/a"], 'project = "/a"'),
    ({"workspace": "/a"}, ["--workspace", "/a"], 'workspace = "/a"'),
    ({"env": {"A": "1"}}, ["--env", "A=1"], 'env = { A = "1" }'),
    ({"strict_limits": True}, ["--strict-limits"], "strict_limits = true"),
    ({"unsafe_writable_home": True}, ["--unsafe-writable-home"], "unsafe_writable_home = true"),
    ({"unsafe_unprotected_mounts": True}, ["--unsafe-unprotected-mounts"], "unsafe_unprotected_mounts = true"),
]


@pytest.mark.parametrize(("request_", "flags", "toml"), SAME, ids=[next(iter(row[0])) for row in SAME])
def test_every_door_gives_the_same_spec(request_: dict[str, Any], flags: list[str], toml: str) -> None:
    wanted = spec.parse(request_)
    assert wanted != spec.parse({})
    assert from_flags(*flags) == wanted
    assert from_toml(f"[defaults]\n{toml}\n") == wanted
    assert spec.parse(json.loads(json.dumps(request_))) == wanted


def test_an_empty_request_has_the_promised_defaults() -> None:
    asked = spec.parse({})
    assert asked.environment.name == "python"
    assert asked.policy.network is Network.OFF
    assert asked.policy.limits == Limits(
        timeout_seconds=30.0, memory_bytes=512 * MIB, pids=128, cpus=1.0, tmp_bytes=256 * MIB, output_bytes=16 * MIB
    )
    assert (asked.policy.mounts, asked.policy.variables, asked.policy.unsafe) == ((), (), ())


@pytest.mark.parametrize(("name", "interpreter"), spec.PRESETS.items())
def test_each_preset_has_its_interpreter(name: str, interpreter: str) -> None:
    assert spec.parse({"environment": name}).environment.interpreter == interpreter


def test_values_of_the_model_are_accepted_as_they_are() -> None:
    mount = Mount(host_path="/a", guest_path="/b")
    asked = spec.parse({"network": Network.FULL, "source": Source.HOST, "mounts": [mount]})
    assert (asked.policy.network, asked.environment.source, asked.policy.mounts) == (
        Network.FULL,
        Source.HOST,
        (mount,),
    )


def test_flags_stand_over_the_settings_and_lists_join(tmp_path: Any) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[defaults]\npids = 7\nmemory_mb = 64\nmounts = ["/a:/a"]\nenv = { A = "1", B = "1" }\n')
    asked = from_flags("--config", str(file), "--pids", "9", "--mount", "/b:/b", "--env", "A=2")
    assert (asked.policy.limits.pids, asked.policy.limits.memory_bytes) == (9, 64 * MIB)
    assert [mount.guest_path for mount in asked.policy.mounts] == ["/a", "/b"]
    assert asked.policy.variables == (("A", "2"), ("B", "1"))


@pytest.mark.parametrize(("toml", "flags"), [("mounts = 3", ["--mount", "/a:/b"]), ("env = 3", ["--env", "A=1"])])
def test_wrong_settings_are_refused_also_where_a_flag_joins_them(toml: str, flags: list[str], tmp_path: Any) -> None:
    file = tmp_path / "a.toml"
    file.write_text(f"[defaults]\n{toml}\n")
    with pytest.raises(SpecError):
        from_flags("--config", str(file), *flags)


# ---- unknown words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "place", "nearest"),
    [
        ({"netwrok": "off"}, "netwrok", "network"),
        ({"memory": 512}, "memory", "memory_mb"),
        ({"timeout": 3}, "timeout", "timeout_seconds"),
        ({"unsafe_writeable_home": True}, "unsafe_writeable_home", "unsafe_writable_home"),
        ({"network": "ful"}, "network", "full"),
        ({"network": "ON"}, "network", None),
        ({"environment": "pyton"}, "environment", "python"),
        ({"source": "nixx"}, "source", "nix"),
        ({"backend": "jial"}, "backend", "jail"),
        ({"mounts": [{"host": "/a", "gest": "/b"}]}, "mounts[0]", "guest"),
        ({1: 2}, "1", None),
    ],
)
@pytest.mark.parametrize("where", ["", "/etc/hutch.toml"])
def test_an_unknown_word_names_its_place_and_the_nearest(
    request_: dict[str, Any], place: str, nearest: str | None, where: str
) -> None:
    error = refusal(request_, where)
    assert error.code == "spec.unknown"
    assert error.message.startswith(f"{where}: {place}: unknown" if where else f"{place}: unknown")
    assert ("did you mean" in error.message) is (nearest is not None)
    assert nearest is None or f'did you mean "{nearest}"?' in error.message
    assert error.hint.startswith("use one of: ")


def test_an_unknown_word_is_shown_in_part_when_it_is_long() -> None:
    assert len(refusal({"environment": "x" * 10_000}).message) < 200


# ---- types and ranges -----------------------------------------------------------------------------------------------

WHOLE = ["memory_mb", "pids", "tmp_mb", "file_mb", "disk_mb", "open_files", "keep_kb", "max_output_mb"]
TEXTS = ["environment", "project", "workspace"]
SWITCHES = ["strict_limits", "unsafe_writable_home", "unsafe_unprotected_mounts"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in WHOLE for value in ("7", 7.5, True, None, [7])),
        *((key, value) for key in ("cpus", "timeout_seconds") for value in ("7", True, [7])),
        *((key, value) for key in TEXTS for value in (7, None, "", ["a"], "a\0b", "\ud800")),
        *((key, value) for key in SWITCHES for value in (1, 0, "true", None)),
        *(("mounts", value) for value in ("/a:/b", 7, None, {"host": "/a"})),
        *(("env", value) for value in ("A=1", 7, None, ["A=1"], {"A": 1}, {"A": None}, {"A": "\0"})),
    ],
    ids=repr,
)
def test_a_wrong_type_is_refused(key: str, value: object) -> None:
    error = refusal({key: value})
    assert error.code == "spec.value"
    assert error.message.startswith(key)


@pytest.mark.parametrize("request_", [None, 7, "environment", ["environment"]])
def test_a_request_is_a_table(request_: object) -> None:
    assert refusal(request_).code == "spec.type"


RANGES = [
    ("memory_mb", 16, 1024 * 1024, 1),
    ("pids", 4, 1_000_000, 1),
    ("cpus", 0.01, 4096, 0.001),
    ("timeout_seconds", 0.01, 7 * 86400, 0.001),
    ("tmp_mb", 1, 1024 * 1024, 1),
    ("file_mb", 1, 1024 * 1024, 1),
    ("disk_mb", 1, 1024 * 1024, 1),
    ("open_files", 16, 1_000_000, 1),
    ("max_output_mb", 1, 1024 * 1024, 1),
]


@pytest.mark.parametrize(("key", "low", "high", "step"), RANGES)
def test_ranges_hold_to_the_last_step(key: str, low: float, high: float, step: float) -> None:
    for inside in (low, high):
        spec.parse({key: inside})
    for outside in (low - step, high + step, -high):
        error = refusal({key: outside})
        assert (error.code, error.message.partition(":")[0]) == ("spec.range", key)
        assert f"{low} to {high}" in error.hint


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("key", ["cpus", "timeout_seconds"])
def test_what_is_no_real_number_is_out_of_range(key: str, value: float) -> None:
    assert refusal({key: value}).code == "spec.range"


def test_an_endless_number_is_out_of_range() -> None:
    assert refusal({"pids": 10**5000}).code == "spec.range"


def test_sizes_become_bytes() -> None:
    limits = spec.parse({"memory_mb": 64, "keep_kb": 2, "tmp_mb": 3, "file_mb": 4, "disk_mb": 5}).policy.limits
    assert (limits.memory_bytes, limits.keep_bytes, limits.tmp_bytes) == (64 * MIB, 2048, 3 * MIB)
    assert (limits.file_bytes, limits.disk_bytes) == (4 * MIB, 5 * MIB)


@pytest.mark.parametrize("kept", [1025, 2048, 1024 * 1024])
def test_keeping_more_than_may_be_printed_is_a_contradiction(kept: int) -> None:
    error = refusal({"keep_kb": kept, "max_output_mb": 1})
    assert error.code == "spec.contradiction"
    assert "max_output_mb" in error.hint


def test_a_list_of_domains_never_silently_means_a_mode() -> None:
    for domains in (["example.org"], (), []):
        assert refusal({"network": domains}).code == "spec.network-list"


def test_a_backend_that_is_still_to_come_is_not_a_wrong_word() -> None:
    error = refusal({"backend": "microvm"})
    assert isinstance(error, HostError)
    assert error.code == "host.microvm"


# ---- mounts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "host", "guest", "writable"),
    [
        ("/a:/b", "/a", "/b", False),
        ("/a:/b:ro", "/a", "/b", False),
        ("/a:/b:rw", "/a", "/b", True),
        ("./data:/data", "./data", "/data", False),
        ("~/x:/home/sandbox/x", "~/x", "/home/sandbox/x", False),
        ("/a b:/c d", "/a b", "/c d", False),
        ({"host": "/a:b", "guest": "/c"}, "/a:b", "/c", False),
        ({"host": "/a", "guest": "/b", "writable": True}, "/a", "/b", True),
    ],
)
def test_the_ways_to_write_a_mount(value: object, host: str, guest: str, writable: bool) -> None:
    assert spec.parse_mount(value) == Mount(host_path=host, guest_path=guest, writable=writable)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("", "spec.mount"),
        ("/a", "spec.mount"),
        (":/b", "spec.mount"),
        ("/a:/b:rx", "spec.mount"),
        ("/a:/b:rw:ro", "spec.mount"),
        ("/a:/b:/c:rw", "spec.mount"),
        (7, "spec.mount"),
        (None, "spec.mount"),
        ({"host": "/a"}, "spec.mount"),
        ({}, "spec.mount"),
        ("/a:", "spec.value"),
        ("/a:rw", "spec.guest-path"),
        ("/a/../b:/c", "spec.host-path"),
        ("..:/c", "spec.host-path"),
        ({"host": "/a", "guest": "/b", "writable": "yes"}, "spec.value"),
        ({"host": 1, "guest": "/b"}, "spec.value"),
        ({"host": "/a", "guest": "/b", "mode": "rw"}, "spec.unknown"),
    ],
    ids=repr,
)
def test_what_is_no_mount_is_refused(value: object, code: str) -> None:
    error = refusal({"mounts": [{"host": "/x", "guest": "/y"}, value]})
    assert error.code == code
    assert error.message.startswith("mounts[1]")


@pytest.mark.parametrize(
    "path", ["/workspace", "/project", "/home/sandbox", "/home/sandbox/.cache", "/cache", "/data", "/data/a/b", "/.x"]
)
def test_guest_paths_that_may_be_mounted(path: str) -> None:
    assert spec.guest_path(path, "here") == path


@pytest.mark.parametrize("path", ["data", "./data", "/", "//", "/a/", "/a//b", "/a/./b", "/a/..", "/" + "x" * 1024])
def test_guest_paths_that_are_not_plain(path: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec.guest_path(path, "here")
    assert caught.value.code == "spec.guest-path"
    assert "/workspace" in caught.value.hint


@pytest.mark.parametrize(
    "path",
    [*(f"/{name}" for name in sorted(spec.SYSTEM_DIRECTORIES)), "/usr/local", "/run/hutch/init", "/etc/passwd", "/home"]
    + ["/home/me", "/home/sandbox2"],
)
def test_guest_paths_that_make_up_the_sandbox(path: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec.guest_path(path, "here")
    assert caught.value.code == "spec.guest-system"


def test_a_ready_mount_obeys_the_same_rules() -> None:
    with pytest.raises(SpecError):
        spec.parse({"mounts": [Mount(host_path="/a", guest_path="/usr")]})


@pytest.mark.parametrize(
    "request_",
    [
        {"mounts": ["/a:/x", "/b:/x"]},
        {"mounts": ["/a:/x", "/b:/x/y"]},
        {"mounts": ["/b:/x/y", "/a:/x"]},
        {"mounts": ["/a:/project"], "project": "/b"},
        {"mounts": ["/a:/workspace/in"], "workspace": "/b"},
        {"mounts": ["/a:/x", "/b:/x-y", "/c:/x/y"]},
    ],
    ids=repr,
)
def test_mounts_must_not_hide_each_other(request_: dict[str, Any]) -> None:
    assert refusal(request_).code == "spec.collision"


@pytest.mark.parametrize("paths", [["/x", "/xy"], ["/x/a", "/x/b"], ["/home/sandbox/a", "/home/sandbox/b"]])
def test_mounts_beside_each_other_are_fine(paths: list[str]) -> None:
    assert len(spec.parse({"mounts": [f"/a:{path}" for path in paths]}).policy.mounts) == 2


def test_the_project_is_read_only_and_the_workspace_is_not() -> None:
    mounts = spec.parse({"project": "/p", "workspace": "/w"}).policy.mounts
    assert [(mount.guest_path, mount.writable) for mount in mounts] == [("/project", False), ("/workspace", True)]


# ---- variables and sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A=B", "A B", "A\n", "\t", "A" * 257, 7, "A\0"])
def test_what_is_no_variable_name_is_refused(name: object) -> None:
    error = refusal({"env": {name: "x"}})
    assert error.code in ("spec.variable", "spec.value")
    assert error.message.startswith("env")


def test_variables_come_in_order_whatever_the_order_of_the_request() -> None:
    assert spec.parse({"env": {"B": "", "A": "1 =\n"}}).policy.variables == (("A", "1 =\n"), ("B", ""))


@pytest.mark.parametrize(
    "name",
    ["API_KEY", "github_token", "MY_SECRET", "DB_PASSWORD", "SSH_AUTH_SOCK", "AWS_REGION", "LD_PRELOAD", "PYTHONPATH"]
    + ["BASH_ENV", "NODE_OPTIONS", "GIT_DIR", "GOOGLE_APPLICATION_CREDENTIALS", "DOCKER_HOST", "ENV"],
)
def test_secrets_are_not_passed_on_by_name_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hidden value")
    with pytest.raises(SpecError) as caught:
        from_flags("--env", name)
    assert caught.value.code == "spec.secret"
    assert f'--env {name}="${name}"' in caught.value.hint
    assert "hidden value" not in str(caught.value.to_json())
    assert from_flags("--env", f"{name}=given").policy.variables == ((name, "given"),)


@pytest.mark.parametrize("name", ["EDITOR", "COLUMNS", "LC_ALL", "ENVIRONMENT"])
def test_other_variables_are_passed_on_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mine")
    assert from_flags("--env", name).policy.variables == ((name, "mine"),)


def test_a_variable_that_is_not_set_is_an_error() -> None:
    with pytest.raises(SpecError, match="you have no such variable") as caught:
        from_flags("--env", "HUTCH_NO_SUCH_VARIABLE")
    assert caught.value.hint == "--env HUTCH_NO_SUCH_VARIABLE=VALUE"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("512M", 512), ("512mb", 512), ("512MiB", 512), ("2G", 2048), ("2gib", 2048), ("0", 0)],
)
def test_the_ways_to_write_a_size(text: str, size: int) -> None:
    assert spec.parse_size_mb(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "M", "1.5G", "-1", "+1", "1 G", "1T", "1k", "0x10", "1_0", "٣", "9" * 13, "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--memory") as caught:
        spec.parse_size_mb(text, "--memory")
    assert caught.value.code == "spec.size"


@pytest.mark.parametrize(("flag", "text"), [("--timeout", "soon"), ("--timeout", "")])
def test_a_flag_that_is_no_number_says_so(flag: str, text: str) -> None:
    with pytest.raises(SpecError, match=f"{flag}: '{text}' is not a number"):
        from_flags(flag, text)


# ---- whatever comes in ----------------------------------------------------------------------------------------------

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=8,
)
LIKELY = st.dictionaries(
    st.sampled_from([*spec.FIELDS]) | st.text(max_size=10),
    ANYTHING | st.sampled_from(["off", "python", "jail", "microvm", "/a", "/a:/b", "none", 17, True]),
    max_size=4,
)
PATHS = st.text("/abc.:-\0 ~é", max_size=12) | st.text(max_size=30)


def survives(function: Any, *arguments: Any) -> Any:
    """The answer, or what was refused; anything but an error of our own with a hint is a crash."""
    try:
        return function(*arguments)
    except HutchError as error:
        told = error.to_json()
    assert all(told[key] for key in ("code", "message", "hint"))
    return told


@given(ANYTHING | LIKELY)
@example({"mounts": [{"host": "/a", "guest": "/b", "writable": None}]})
@example({"env": {"": ""}})
def test_no_request_crashes_and_each_gives_one_answer(request_: Any) -> None:
    # Written out, because nan is not equal to itself.
    assert repr(survives(spec.parse, request_)) == repr(survives(spec.parse, request_))


@given(ANYTHING | PATHS)
def test_no_mount_crashes(value: Any) -> None:
    mount = survives(spec.parse_mount, value, "here")
    if isinstance(mount, Mount):
        assert mount.guest_path.startswith("/")
        assert mount.guest_path.split("/")[1] not in spec.SYSTEM_DIRECTORIES
        assert ".." not in mount.host_path.split("/")


@given(ANYTHING | PATHS)
def test_no_guest_path_crashes(value: Any) -> None:
    path = survives(spec.guest_path, value, "here")
    assert isinstance(path, dict) or (path == value and path[0] == "/" and path[-1] != "/")


@given(st.text() | st.from_regex(r"[0-9]{1,15}[a-zA-Z]{0,3}", fullmatch=True))
def test_no_size_crashes(text: str) -> None:
    size = survives(spec.parse_size_mb, text, "here")
    assert isinstance(size, dict) or size >= 0


TABLE = st.sampled_from(["defaults", "project", "daemon", "session", "environments", "environments.a", "x", '"é"'])
VALUE = st.sampled_from(
    ["1", "-1", "1.5", "nan", "true", '"x"', "[]", "[1]", "{}", "{a = 1}", "1979-05-27", "07:32:00"]
)
LINE = (
    st.builds("[{}]".format, TABLE)
    | st.builds("{} = {}".format, st.sampled_from([*spec.FIELDS, "path", "preset", "mount_point", "x"]), VALUE)
    | st.text(max_size=10)
)


@given(st.lists(LINE, max_size=8).map("\n".join).map(str.encode) | st.binary(max_size=40))
def test_no_settings_crash(text: bytes) -> None:
    settings = survives(config.parse_settings, text, "f")
    if isinstance(settings, config.Settings):
        for name in ("python", *settings.environments):
            survives(spec.parse, settings.request(name))


NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)
PLAIN = st.text(st.characters(blacklist_characters="\0:/", blacklist_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda text: text not in (".", "..")
)
VALID = st.fixed_dictionaries(
    {},
    optional={
        "environment": st.sampled_from([*spec.PRESETS]),
        "packages": st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,20}", fullmatch=True), max_size=3),
        "source": st.sampled_from([source.value for source in Source]),
        "network": st.sampled_from([network.value for network in Network]),
        "mounts": st.lists(
            st.fixed_dictionaries({"host": PLAIN.map("/".__add__), "guest": PLAIN.map("/data-".__add__)}),
            max_size=3,
            unique_by=lambda mount: mount["guest"],
        ),
        "env": st.dictionaries(NAMES, st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))),
        "timeout_seconds": st.none() | st.floats(0.01, 1000),
        "memory_mb": st.integers(16, 4096),
        "pids": st.integers(4, 4096),
        "cpus": st.floats(0.01, 64),
        "tmp_mb": st.integers(1, 4096),
        "file_mb": st.integers(1, 4096),
        "disk_mb": st.integers(1, 4096),
        "open_files": st.integers(16, 4096),
        "keep_kb": st.integers(1, 1024),
        "max_output_mb": st.integers(1, 4096),
        "strict_limits": st.booleans(),
        "unsafe_writable_home": st.booleans(),
    },
)


def to_request(asked: Spec) -> dict[str, Any]:
    """A request that says everything a Spec holds."""
    limits, policy = asked.policy.limits, asked.policy
    return {
        "environment": asked.environment.name,
        "packages": list(asked.environment.packages),
        **({"source": asked.environment.source.value} if asked.environment.source else {}),
        "backend": asked.backend,
        "network": policy.network.value,
        "mounts": [{"host": m.host_path, "guest": m.guest_path, "writable": m.writable} for m in policy.mounts],
        "env": dict(policy.variables),
        "timeout_seconds": limits.timeout_seconds,
        "memory_mb": limits.memory_bytes // MIB,
        "pids": limits.pids,
        "cpus": limits.cpus,
        "tmp_mb": limits.tmp_bytes // MIB,
        "file_mb": limits.file_bytes // MIB,
        "disk_mb": limits.disk_bytes // MIB,
        "open_files": limits.open_files,
        "keep_kb": limits.keep_bytes // 1024,
        "max_output_mb": limits.output_bytes // MIB,
        "strict_limits": policy.strict_limits,
        **{switch.value: switch in policy.unsafe for switch in Unsafe},
    }


@given(VALID)
def test_a_valid_request_comes_back_whole(request_: dict[str, Any]) -> None:
    asked = spec.parse(request_)
    again = to_request(asked)
    assert spec.parse(again) == asked
    assert hash(spec.parse(json.loads(json.dumps(again)))) == hash(asked)
    for key, value in request_.items():
        assert again[key] == value or key == "mounts"


def test_the_way_back_says_every_key_of_the_schema() -> None:
    # project and workspace are shorthands for mounts.
    assert {*to_request(spec.parse({"source": "host"})), "project", "workspace"} == set(spec.FIELDS)
