"""The probe picks the strongest sandbox that works, or raises an error with the fix. Also tests the seccomp filter."""

from __future__ import annotations

import errno
import marshal
import os
import re
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_attacks import CALLS, GOOD, LIMITS

from gspo.errors import ConfigError
from gspo.reward.function import RewardWarning
from gspo.reward.rewards import code_tests
from gspo.reward.sandbox import probe
from gspo.reward.sandbox.box import Box, SandboxError
from gspo.reward.sandbox.grade import End, Grade, grade_all
from gspo.reward.sandbox.inside import seccomp
from gspo.reward.sandbox.interpreter import _sources
from gspo.reward.sandbox.level import Level, identity
from gspo.reward.sandbox.probe import sandbox_level


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clear the cached probe result for every test."""
    probe._best.cache_clear()
    yield
    probe._best.cache_clear()


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probe, "_candidates", lambda python, own_users: iter(["bubblewrap: bwrap is not installed", "landlock: none"])
    )


def test_level_describes_itself() -> None:
    level = sandbox_level()
    assert level.number in (5, 6)
    assert str(level).startswith(f"L{level.number} {level.name} (")
    assert level.python.version in str(level)


def test_probe_runs_once() -> None:
    assert sandbox_level() is sandbox_level()


@pytest.mark.usefixtures("no_sandbox")
def test_missing_sandbox_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        code_tests.check()
    message = str(caught.value)
    assert "bwrap is not installed" in message
    assert "apt-get install bubblewrap" in message
    assert "allow_unsafe" in message
    assert "\n" not in message


@pytest.mark.usefixtures("no_sandbox")
def test_allow_unsafe_continues_without_a_sandbox() -> None:
    with pytest.warns(RewardWarning, match="NO SANDBOX"):
        level = sandbox_level(allow_unsafe=True)
    assert level.number == 0
    (grade,) = grade_all([GOOD], CALLS, level, LIMITS)
    assert isinstance(grade, Grade)
    assert grade.end is End.PASSED


def test_allow_unsafe_is_ignored_if_a_sandbox_works() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sandbox_level(allow_unsafe=True).number in (5, 6)


def test_a_warning_from_a_worker_reaches_the_trainer(make_pool: Any, reward_file: Any) -> None:
    spec = reward_file(
        """
        import warnings
        from gspo.reward.function import RewardWarning
        warnings.warn("no protection", RewardWarning)
        warnings.warn("of no interest", UserWarning)
        def score(prompts, completions, **columns): return [0.0 for _ in completions]
        """
    )
    with pytest.warns() as caught:
        make_pool(spec)
    assert [str(w.message) for w in caught if "no " in str(w.message)] == ["no protection"]


def test_bubblewrap_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that forbids user namespaces: the probe uses the next level and reports the reason."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    tmp_path.chmod(0o755)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    level, reasons = probe._best("", False)
    assert any("No permissions to create a new namespace" in r or "Permission denied" in r for r in reasons)
    if level is None:
        pytest.skip(f"no Landlock here: {reasons}")
    assert level.number == 6


def test_missing_python_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"code_tests\.python: no Python that .* /no/python: no such program.*; set it to"
    ):
        code_tests.check(python="/no/python")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files that others cannot read")
def test_python_in_an_inaccessible_home_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "python").symlink_to("/usr/bin/python3")
    with pytest.raises(ConfigError, match="as user"):
        code_tests.check(python=str(tmp_path / "python"))


def test_installed_packages_on_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path("/tmp") / f"gspo-venv-{os.getpid()}"
    python = sandbox_level().python.path
    made = subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], capture_output=True)
    try:
        if made.returncode:
            pytest.skip(f"{python} cannot make virtual environments")
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "installed.py").write_text("def double(x): return 2 * x")
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        program = "from installed import double as solve"
        ends = []
        for packages in (True, False):
            level = sandbox_level(str(folder / "bin/python"), packages)
            (grade,) = grade_all([program], CALLS, level, LIMITS)
            ends.append(grade.end if isinstance(grade, Grade) else grade)
        assert ends == [End.PASSED, End.ERROR]
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_files_that_programs_can_read_are_cached() -> None:
    """Otherwise the first program to read a file would leave a trace that another can measure."""
    path = f"{sandbox_level().python.listed[0]}/this.py"
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            before = os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            before = 0
        if before:
            pytest.skip("this file system keeps its files in memory")
    probe._best.cache_clear()
    sandbox_level()
    with open(path, "rb") as file:
        assert os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1


@pytest.mark.parametrize(
    "wrapper",
    [("/bin/false",), ("/bin/echo", "v"), ("/no/such/program",), ("/bin/sh", "-c", "echo why >&2; exit 3", "--")],
)
def test_sandbox_failure_does_not_score_0(wrapper: tuple[str, ...]) -> None:
    level = Level(number=5, python=sandbox_level().python, own_users=False, wrapper=wrapper)
    grades = grade_all([GOOD], CALLS, level, LIMITS)
    assert [type(grade) for grade in grades] == [SandboxError]
    assert "\n" not in str(grades[0])


def test_process_that_cannot_confine_itself_runs_no_program() -> None:
    """The filter does not support this machine: the process reports that and ends before it reads a program."""
    level = sandbox_level()
    source = [(name, text.replace('"x86_64"', '"none"').replace('"aarch64"', '"none2"')) for name, text in _sources()]
    code = marshal.dumps([(name, compile(text, name, "exec", dont_inherit=True)) for name, text in source])
    python = replace(level.python, code=code)
    if level.python.version.rpartition(".")[0] != f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip("compiled code is for one version of Python")
    grades = grade_all([GOOD], CALLS, replace(level, python=python), LIMITS)
    assert [type(grade) for grade in grades] == [SandboxError]
    assert "no table of system calls" in str(grades[0])


def test_every_sandbox_of_root_has_its_own_user() -> None:
    if os.geteuid() != 0:
        assert identity(True) == {}
        return
    users = [identity(True)["user"] for _ in range(8)]
    assert len(set(users)) == 8
    assert identity(False)["user"] == 65534


def test_start_up_has_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.reward.sandbox.box.START_S", 0.2)
    level = Level(number=5, python=sandbox_level().python, own_users=False, wrapper=("/bin/sleep", "99", "#"))
    start = time.monotonic()
    with Box(level, "candidate", limit_s=1, memory_mb=64) as box, pytest.raises(SandboxError, match="cannot start"):
        box.ready()
    assert time.monotonic() - start < 60


# ------------------------------------------------------------------------------------------- the filter by itself

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def run_filter(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Interpret the BPF instructions that the filter uses, as the kernel would."""
    data = struct.pack("IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    steps = [struct.unpack("HBBI", code[i : i + 8]) for i in range(0, len(code), 8)]
    accumulator, at = 0, 0
    while True:
        kind, when_true, when_false, value = steps[at]
        at += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("I", data, value)
        elif kind == 0x54:
            accumulator &= value
        elif kind in (0x15, 0x35):
            at += when_true if (accumulator == value if kind == 0x15 else accumulator >= value) else when_false
        else:
            assert kind == 0x06
            return value


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter(machine: str) -> None:
    column, architecture = seccomp.MACHINES[machine]
    code, other = seccomp.assemble(machine, 77), 0xC00000B7 if machine == "x86_64" else 0xC000003E
    assert len(code) // 8 < 4096

    def does(number: int, *arguments: int) -> int:
        return run_filter(code, architecture, number, *arguments)

    for name, numbers in seccomp.DENIED.items():
        assert numbers[column] < 0 or does(numbers[column]) == EPERM, name
    for name, numbers in seccomp.UNKNOWN.items():
        assert does(numbers[column]) == ENOSYS, name
    assert run_filter(code, other, 0) == KILL
    seen = (0x5412, 0x541C, 0x8901, 0x8902, 0xC020660B, 0x40087602, 0x59616D61)  # TIOCSTI ... FS_IOC_SETVERSION ...
    read, write, futex, mmap = {"x86_64": (0, 1, 202, 9), "aarch64": (63, 64, 98, 222)}[machine]
    assert {does(number) for number in (read, write, futex, mmap)} == {ALLOW}
    assert {does(500), does(2**30 + 1), does(2**32 - 1)} == {ENOSYS}
    for numbers in seccomp.ONLY_SELF.values():
        assert [does(numbers[column], pid) for pid in (77, 78, 0, 1, 2**32 - 1)] == [ALLOW, EPERM, EPERM, EPERM, EPERM]
    for numbers in seccomp.ONLY_ZERO.values():
        assert [does(numbers[column], pid) for pid in (0, 77)] == [ALLOW, EPERM]
    for numbers in seccomp.OWN_CLOCKS.values():
        assert [does(numbers[column], clock) for clock in (0, 1, 11, 2**31, 2**32 - 6)] == [ALLOW] * 3 + [EPERM] * 2
    for numbers, which, values in seccomp.COMMANDS.values():
        assert {does(numbers[column], *(0,) * which, value) for value in values} == {ALLOW}
        others = {*range(2000), *seen, 2**32 - 1} - set(values)
        assert {does(numbers[column], *(0,) * which, value) for value in others} == {EPERM}
    clone, socketpair, sendto, openat = {"x86_64": (56, 53, 44, 257), "aarch64": (220, 199, 206, 56)}[machine]
    assert [does(clone, flags) for flags in (0x10000, 0x3D0F00, 17, 0x10000000, 0)] == [
        ALLOW,
        ALLOW,
        EPERM,
        EPERM,
        EPERM,
    ]
    flags = (0x22, 0x20022, 0x2022, 0x8002, 0x40022)  # anonymous, stack; locked, populate, huge pages
    assert [does(mmap, 0, 0, 0, flag) for flag in flags] == [ALLOW, ALLOW, EPERM, EPERM, EPERM]
    assert [does(socketpair, family) for family in (1, 2, 16)] == [ALLOW, EPERM, EPERM]
    assert [does(sendto, 0, 0, 0, 0, address) for address in (0, 1, 2**32)] == [ALLOW, EPERM, EPERM]
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC)
    assert [does(openat, 0, 0, flag) for flag in flags] == [ALLOW, ALLOW, ALLOW, EPERM]


HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_of_system_calls(machine: str) -> None:
    """Compare with the kernel headers, if they are installed; aarch64 uses the generic list."""
    header = Path("/usr/include") / HEADERS[machine]
    if not header.exists():
        pytest.skip("no kernel headers")
    known = {
        name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\n", header.read_text())
    }
    column = seccomp.MACHINES[machine][0]
    tables: list[dict[str, tuple[int, int]]] = [seccomp.DENIED, seccomp.UNKNOWN, seccomp.ONLY_SELF, seccomp.ONLY_ZERO]
    tables.append(seccomp.OWN_CLOCKS)
    tables.append({name: numbers for name, (numbers, _, _) in seccomp.COMMANDS.items()})
    newest = max(number for name, number in known.items() if name != "syscalls")
    for table in tables:
        for name, numbers in table.items():
            assert numbers[column] > newest or known.get(name, -1) == numbers[column], name
