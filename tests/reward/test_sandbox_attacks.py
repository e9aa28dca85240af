"""Attacks S1 to S25, at every sandbox level that this machine supports.

Each attack scores 0 within its limit, other programs' scores do not change, and the host is unchanged. Attacks record
their outcomes, and the tests check the records, so an attack that was never made does not count as one that was
stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sandbox_attacks
from processes import descendants, descriptors, is_running, settled
from sandbox_attacks import (
    ASSERTS,
    ATTACKS,
    BAD,
    CALLS,
    GOOD,
    GOOD_SCRIPT,
    LIMITS,
    OUTPUT,
    SHORT,
    Attack,
    filled,
    graded,
    notes_of,
    refused,
)

from gspo.reward.sandbox import clock, probe
from gspo.reward.sandbox.box import Box
from gspo.reward.sandbox.grade import End, Grade, grade_all, longest_s
from gspo.reward.sandbox.level import FIRST_USER, NAMES, USERS, Level
from gspo.reward.sandbox.probe import flaw
from gspo.reward.sandbox.suite import read_suite

ROOT = Path(__file__).parent.parent.parent
PATIENT = 100.0
SECRET = "hunter2-planted-in-the-environment"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each program enough time even on a busy machine."""
    monkeypatch.setattr(clock, "PATIENCE_ALONE", PATIENT)


@pytest.fixture(scope="module")
def found() -> list[Level | str]:
    return sandbox_attacks.levels()


@pytest.fixture(scope="module", params=[5, 6], ids=lambda number: NAMES[number])
def level(request: pytest.FixtureRequest, found: list[Level | str]) -> Level:
    for candidate in found:
        if isinstance(candidate, Level) and candidate.number == request.param:
            return candidate
    reasons = [reason for reason in found if isinstance(reason, str) and reason.startswith(NAMES[request.param])]
    pytest.skip(f"this machine does not have this level: {'; '.join(reasons)}")


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Any]]:
    """World-accessible resources on the host, so it is the sandbox that stops a program and not the file modes."""
    folder = Path(tempfile.mkdtemp(prefix="gspo-attack-", dir="/tmp"))
    folder.chmod(0o777)
    (folder / "file").write_text(SECRET)
    (folder / "file").chmod(0o666)
    name = f"gspo-{os.urandom(6).hex()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        unix.bind(f"{folder}/socket")
        (folder / "socket").chmod(0o777)
        abstract.bind(f"\0{name}")
        datagrams.bind(f"\0{name}d")
        for listener in (tcp, unix, abstract, datagrams):
            listener.setblocking(False)
        for listener in (unix, abstract):
            listener.listen()
        yield {
            "place": str(folder),
            "file": str(Path(__file__).absolute()),
            "pid": os.getpid(),
            "tcp": tcp.getsockname()[1],
            "plant": name,
            "secret": SECRET,
        }
        for listener in (tcp, unix, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    assert sorted(os.listdir(folder)) == ["file", "socket"]
    assert (folder / "file").read_text() == SECRET
    assert (folder / "file").stat().st_mode & 0o777 == 0o666
    for place in ("/tmp", "/", "/dev/shm", "/var/tmp", str(Path.cwd()), str(Path.home())):
        assert not (Path(place) / name).exists()
    shutil.rmtree(folder)


def test_this_machine_has_a_sandbox(found: list[Level | str]) -> None:
    """Never skipped: without a sandbox, the other tests here would prove nothing."""
    assert [level for level in found if isinstance(level, Level)], f"install bubblewrap: {found}"


JUDGED = [name for name in ATTACKS if name.startswith(("S12", "S13", "S20"))]
"""Attacks on the verdict, which is computed in the same way at every level."""


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in JUDGED])
def test_attack(name: str, level: Level, places: Mapping[str, Any]) -> None:
    attack_fails(ATTACKS[name], level, places)


@pytest.mark.parametrize("name", JUDGED)
def test_attack_on_the_verdict(name: str, found: list[Level | str], places: Mapping[str, Any]) -> None:
    attack_fails(ATTACKS[name], next(level for level in found if isinstance(level, Level)), places)


@pytest.mark.slow
@pytest.mark.parametrize("name", JUDGED)
def test_attack_on_the_verdict_at_every_level(name: str, level: Level, places: Mapping[str, Any]) -> None:
    attack_fails(ATTACKS[name], level, places)


def attack_fails(attack: Attack, level: Level, places: Mapping[str, Any]) -> None:
    grade, seconds, other = graded(attack, level, places)
    assert isinstance(grade, Grade), grade
    assert grade.end in attack.ends, grade
    assert grade.value(all_or_nothing=True) == 0.0
    assert seconds < PATIENT / clock.PATIENCE * longest_s(attack.limits.limit_s)
    assert isinstance(other, Grade), other
    assert other.end is End.PASSED, other
    if attack.check:
        attack.check(notes_of(attack, level, places), places)


def test_attacks_among_honest_programs(level: Level, places: Mapping[str, Any]) -> None:
    """One judge serves all of them, and one program's answers do not change the next one's verdict."""
    attacks = [filled(a, places) for a in ATTACKS.values() if a.suite is ASSERTS]
    programs = [program for attack in attacks for program in (attack, GOOD)] + [BAD]
    grades = grade_all(programs, ASSERTS, level, LIMITS)
    values = [g.value(all_or_nothing=True) for g in grades if isinstance(g, Grade)]
    assert values == [0.0, 1.0] * len(attacks) + [0.0]


# ------------------------------------------------------------------------------------------- the usual case: not root


@pytest.fixture(scope="module")
def user() -> tuple[str, dict[str, Any]]:
    """A Python that an unprivileged user can run with this package, and the arguments to become that user."""
    if os.geteuid() != 0:
        return sys.executable, {}
    identity = {"user": 65534, "group": 65534, "extra_groups": []}
    for python in (sys.executable, "/usr/bin/python3"):
        code = "import sys; assert sys.version_info >= (3, 11); import gspo.reward.sandbox.probe"
        try:
            subprocess.run([python, "-c", code], check=True, capture_output=True, cwd=ROOT, **identity)
        except (OSError, subprocess.SubprocessError):
            continue
        return python, identity
    pytest.skip("no Python 3.11 that an ordinary user can run with this repository")


def test_as_an_ordinary_user(level: Level, places: Mapping[str, Any], user: tuple[str, dict[str, Any]]) -> None:
    """Trainer and program run as the same user, so file modes and signal permissions protect nothing."""
    python, identity = user
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "WANDB_API_KEY": SECRET}
    arguments = [python, "-m", "sandbox_attacks", str(level.number), json.dumps({**places, "pid": os.getpid()})]
    run = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd="/", timeout=600, **identity)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout)
    assert SECRET not in run.stdout
    for name, result in results.items():
        assert result["end"] in ATTACKS[name].ends, (name, result)
        attack = ATTACKS[name]
        assert result["seconds"] < longest_s(attack.limits.limit_s)
        assert attack.check
        attack.check(result["notes"], places)
    assert len(results) == sum(attack.check is not None for attack in ATTACKS.values())


ENVIRON = """
import json, os, sys
from sandbox_attacks import *
places = {"pid": os.getpid(), "secret": "", "plant": "", "place": "/tmp"}
attack = Attack(code='attempt("environ", lambda: open("/proc/%d/environ" % PID).read())')
level, = [l for l in levels() if isinstance(l, Level) and l.number == int(sys.argv[1])]
unsafe = Level(number=0, python=level.python, own_users=level.own_users)
print(json.dumps([notes_of(attack, l, places) for l in (level, unsafe)]))
"""


def test_secret_in_the_trainers_environment(level: Level, user: tuple[str, dict[str, Any]]) -> None:
    """S8, S9: the secret is set when the trainer starts. Without the sandbox the same program can read it."""
    python, identity = user
    environment = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "HF_TOKEN": SECRET, "PATH": os.environ["PATH"]}
    arguments = [python, "-c", ENVIRON, str(level.number)]
    run = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd="/", timeout=600, **identity)
    assert run.returncode == 0, run.stderr[-2000:]
    ((inside,), (outside,)) = json.loads(run.stdout)
    assert inside[1] in ("PermissionError", "FileNotFoundError")
    assert outside[1] == "DONE"
    assert SECRET in outside[2]


STARTER = """
import threading
def start(most):
    threading.stack_size(65536)
    for count in range(most):
        try: threading.Thread(target=threading.Event().wait, daemon=True).start()
        except RuntimeError: return count
    return most
"""
NEIGHBORS = """
import json, sys, time
from contextlib import ExitStack
from sandbox_attacks import *
number, code = sys.argv[1:]
level, = [l for l in levels() if isinstance(l, Level) and l.number == int(number)]
counts = []
with ExitStack() as stack:
    boxes = [stack.enter_context(Box(level, "candidate", limit_s=60, memory_mb=256)) for _ in range(5)]
    for box in boxes:
        box.ready()
    honest, *greedy = boxes
    for box, most in [*((box, 1000) for box in greedy), (honest, 20)]:
        for line in (encode(code, len), '["name", "start"]', '["call", {"r": 0}, [%d], {"d": []}]' % most):
            answer = box.ask(line.encode(), time.monotonic() + 60)
        counts.append(int(answer[1:]))
print(json.dumps(counts))
"""


def test_threads_are_counted_by_sandbox_and_not_by_user(level: Level, user: tuple[str, dict[str, Any]]) -> None:
    """Programs that start as many threads as they can do not take threads away from one that started earlier."""
    python, identity = user
    environment = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "PATH": os.environ["PATH"]}
    arguments = [python, "-c", NEIGHBORS, str(level.number), STARTER]
    run = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd="/", timeout=600, **identity)
    assert run.returncode == 0, run.stderr[-2000:]
    *greedy, honest = json.loads(run.stdout)
    assert all(20 <= count <= 40 for count in greedy), greedy
    assert honest == 20


# ------------------------------------------------------------------------------------------- clean-up


def test_a_second_program_sees_nothing_of_the_first(level: Level, places: Mapping[str, Any]) -> None:
    """S22."""
    leave = """
import builtins
def leave():
    for place in ("/tmp", ".", "/", "/dev", "/dev/shm", "/var/tmp", PLACE):
        attempt(place, lambda: open(os.path.join(place, PLANT + "-left"), "w").write("x"))
    shared_memory = lambda: __import__("multiprocessing.shared_memory").shared_memory
    attempt("shared memory", lambda: shared_memory().SharedMemory("left", True, 10))
    attempt("segment", lambda: call(29 if X86 else 194, 4243, 4096, 0o1666))
    attempt("key", lambda: call(248 if X86 else 217, b"user", b"left", b"x", 1, -4))
leave()
os.environ["LEFT"] = builtins.left = sys.modules["left"] = "x"
attempt("own process", lambda: os.environ["LEFT"])
"""
    look = """
import builtins
attempt("environment", lambda: os.environ["LEFT"])
attempt("builtins", lambda: builtins.left)
attempt("modules", lambda: sys.modules["left"])
for place in ("/tmp", ".", "/", "/dev", "/dev/shm", "/var/tmp", PLACE):
    attempt(place, lambda: open(os.path.join(place, PLANT + "-left")))
attempt("segment", lambda: call(29 if X86 else 194, 4243, 4096, 0))
"""
    left = notes_of(Attack(code=leave), level, places)
    assert left[-1][1] == "DONE"
    seen = notes_of(Attack(code=look), level, places)
    assert len(seen) == 11
    assert [note for note in seen if note[1] == "DONE"] == []


def processes_of_this_test() -> set[int]:
    """Sandboxed processes that this process started, even if they were reparented."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = b"gspo.reward.sandbox.inside" in (entry / "cmdline").read_bytes()
            if ours and (os.geteuid() or 0 <= entry.stat().st_uid - FIRST_USER < USERS):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def test_nothing_is_left_running_or_open(level: Level, children: Any) -> None:
    """S18, F21: no process, zombie or descriptor remains."""
    sleeper = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n" + GOOD
    hang = "import time\ndef solve(x): time.sleep(60)"
    limits = replace(SHORT, limit_s=0.2)
    grade_all([GOOD], CALLS, level, limits)
    before, running = descriptors(), children()
    for _ in range(2):
        grade_all([sleeper, hang, "import os; os._exit(1)", GOOD], CALLS, level, limits)
        grade_all(["import time; time.sleep(60)", GOOD_SCRIPT], OUTPUT, level, limits)
    assert settled(children, running) == running
    assert settled(descriptors, before) == before
    assert settled(processes_of_this_test, set()) == set()


TRAINER = """
import sys, time
from sandbox_attacks import *
level, = [l for l in levels() if isinstance(l, Level) and l.number == int(sys.argv[1])]
box = Box(level, "candidate", mode=sys.argv[2], limit_s=60, memory_mb=256)
box.ready()
print("ready", flush=True)
code = "import time, ctypes; ctypes.CDLL(None).prctl(1, 0)\\nwhile True: time.sleep(1)"
box.ask(encode(code, len).encode(), time.monotonic() + 60)
box.ask(b'""', time.monotonic() + 60)
"""


@pytest.mark.parametrize("mode", ["calls", "stdin"])
def test_nothing_survives_the_trainer(level: Level, mode: str) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "PATH": os.environ["PATH"]}
    arguments = [sys.executable, "-c", TRAINER, str(level.number), mode]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        time.sleep(0.3)
        family = descendants(trainer.pid)
        trainer.kill()
    assert len(family) >= 1 + (mode == "stdin")
    until = time.monotonic() + 60
    while (alive := [pid for pid in family if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    assert alive == []


# ------------------------------------------------------------------------------------------- many at once

HONEST = [GOOD, BAD, "def solve(x): return x + x", "def solve(x): return x", "solve = lambda x: x << 1", "x ="]
EXPECTED = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def values_at(parallelism: int, programs: list[str], level: Level) -> list[float]:
    def one(program: str) -> float:
        (grade,) = grade_all([program], CALLS, level, LIMITS)
        assert isinstance(grade, Grade), grade
        return grade.value(all_or_nothing=True)

    with ThreadPoolExecutor(parallelism) as pool:
        return list(pool.map(one, programs))


def test_same_scores_at_parallelism_1_and_16(level: Level) -> None:
    assert values_at(1, HONEST, level) == EXPECTED
    assert values_at(16, HONEST * 3, level) == EXPECTED * 3


@pytest.mark.slow
def test_five_hundred_programs(level: Level) -> None:
    """S21: no false failures."""
    assert values_at(16, HONEST * 84, level) == EXPECTED * 84


# ------------------------------------------------------------------------------------------- the levels themselves


def test_the_probe_notices_a_level_that_leaks(level: Level) -> None:
    """Without the filter and without file restrictions, the probe lists what a program could do."""
    unsafe = Level(number=0, python=level.python, own_users=level.own_users)
    assert flaw(unsafe)


def test_programs_never_run_as_root(level: Level) -> None:
    notes = notes_of(
        Attack(code='attempt("user", lambda: str(os.getresuid() + os.getresgid()))'), level, {"secret": ""}
    )
    assert "0" not in notes[0][2].strip("()").split(", ")


def test_what_programs_may_do(level: Level) -> None:
    """The sandbox does not restrict ordinary programs: threads, asyncio, the standard library, deep recursion."""
    program = """
import asyncio, collections, datetime, decimal, fractions, functools, heapq, itertools, json, math, random, re
import statistics
import string, sys, tempfile, threading, typing, dataclasses, unicodedata, zlib, hashlib, bisect, copy, enum, operator

@dataclasses.dataclass
class Pair:
    a: int
    b: int

def solve(x):
    sys.setrecursionlimit(10_000)
    def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
    found = []
    thread = threading.Thread(target=lambda: found.append(deep(5000)))
    thread.start(); thread.join()
    async def double(): await asyncio.sleep(0); return 2 * x
    result = asyncio.run(double())
    with open("/dev/null", "w") as nowhere: print("x", file=nowhere)
    print("chatter"); sys.stderr.write("chatter")
    assert found == [5000] and Pair(1, 2) == Pair(1, 2) and hashlib.sha256(b"").hexdigest()
    return result
"""
    (grade,) = grade_all([program], CALLS, level, LIMITS)
    assert isinstance(grade, Grade)
    assert grade.end is End.PASSED, grade


@pytest.fixture(scope="module")
def packed(level: Level) -> Iterator[Level]:
    """The same level with a separate Python that has packages in every location where they can be installed."""
    home = Path(tempfile.mkdtemp(prefix="gspo-python-", dir="/tmp"))
    home.chmod(0o755)
    query = "import os, sys; print(os.path.dirname(os.__file__), os.path.basename(os.path.dirname(os.__file__)))"
    run = subprocess.run([level.python.real, "-S", "-c", query], capture_output=True, text=True, check=True)
    library, name = run.stdout.split()
    own = home / "lib" / name
    for folder in (home / "bin", own / "site-packages", own / "dist-packages", home / "lib/python3/dist-packages"):
        folder.mkdir(parents=True)
    for entry in Path(library).iterdir():
        if not entry.name.endswith("-packages"):
            (own / entry.name).symlink_to(entry)
    for folder in home.rglob("*-packages"):
        (folder / "installed.py").write_text(f"SECRET = {SECRET!r}\n")
        (folder / "installed.pth").write_text("import installed\n")
    shutil.copy(level.python.real, home / "bin/python3")
    try:
        python, own_users = probe._interpreter(str(home / "bin/python3"), False)
        for candidate in probe._candidates(python, own_users):
            if isinstance(candidate, Level) and candidate.number == level.number and not flaw(candidate):
                yield candidate
                return
        pytest.fail(str([flaw(c) for c in probe._candidates(python, own_users) if isinstance(c, Level)]))
    finally:
        shutil.rmtree(home)


def test_without_packages_only_the_standard_library_can_be_read(packed: Level) -> None:
    home = str(Path(packed.python.real).parent.parent)
    program = """
import glob, importlib.util, site
folders = [folder for pattern in ("lib/*/*-packages", "lib/*-packages") for folder in glob.glob(HOME + "/" + pattern)]
names = (VERSION + "/site-packages", VERSION + "/dist-packages", "python3/dist-packages")
folders += [HOME + "/lib/" + name for name in names]
folders += ["/usr/lib/python3/dist-packages", "/usr/local/lib/" + VERSION + "/dist-packages"]
attempt("as it is", lambda: __import__("installed"))
for folder in folders:
    attempt("read " + folder, lambda: open(folder + "/installed.py").read())
    attempt("open " + folder, lambda: os.open("installed.py", os.O_RDONLY, dir_fd=os.open(folder, os.O_PATH)))
    spec = importlib.util.spec_from_file_location("x", folder + "/installed.py")
    attempt("load " + folder, lambda: spec.loader.get_code("x"))
    attempt("any module " + folder, lambda: open(glob.glob(folder + "/*.py")[0]).read())
sys.path += folders
for folder in folders: site.addsitedir(folder)
attempt("by path", lambda: __import__("installed"))
site.main()
attempt("through site", lambda: __import__("installed"))
attempt("pip", lambda: __import__("ensurepip").version())
"""
    places = {"secret": SECRET, "home": home, "version": Path(packed.python.listed[0]).name}
    refused(24)(notes_of(Attack(code=program), packed, places), places)
    if packed.number == 5:  # as on a kernel without Landlock
        open_wide = replace(packed, python=replace(packed.python, readable=packed.python.places, listed=()))
        refused(24)(notes_of(Attack(code=program), open_wide, places), places)
    works = "import json, ctypes, sqlite3, decimal, ssl, lzma, zoneinfo, email.message, xml.dom\n" + GOOD
    (grade,) = grade_all([works], CALLS, packed, LIMITS)
    assert isinstance(grade, Grade)
    assert grade.end is End.PASSED, grade


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("sys.stdout = open(1, 'w'); print(x)", End.PASSED),
        ("sys.stdout = open(1, 'w'); print(x); sys.exit(3)", End.ERROR),
        ("out = os.fdopen(1, 'w'); out.write(x); out.close(); sys.exit(0)", End.PASSED),
        ("with os.fdopen(1, 'w') as out: out.write(x)\nsys.exit('no')", End.ERROR),
        ("print(x, flush=True); os.close(1); time.sleep(0.3); os._exit(0)", End.PASSED),
        ("print(x, flush=True); os.close(1); time.sleep(0.3); os._exit(7)", End.ERROR),
        ("print(x); sys.stdout.close(); time.sleep(0.3); raise ValueError", End.ERROR),
        ("print(x); sys.stdout.close(); os.kill(os.getpid(), 11)", End.DIED),
        ("os.write(1, x.encode()); os.dup2(2, 1); time.sleep(0.3); sys.exit(0)", End.PASSED),
        ("os.write(1, x.encode()); os.dup2(2, 1); time.sleep(0.3); 1 / 0", End.ERROR),
        ("print(x, flush=True); os.close(1); print('more')", End.ERROR),
    ],
)
def test_exit_codes_of_programs_that_close_their_output(last: str, end: End, level: Level) -> None:
    """The sandbox must report the same exit code as plain Python."""
    program = f"import os, sys, time\nx = str(2 * int(input()))\n{last}\n"
    run = subprocess.run([level.python.real, "-S", "-c", program], input="3\n", capture_output=True, text=True)
    assert (run.returncode == 0 and run.stdout.strip() == "6") is (end is End.PASSED)
    (grade,) = grade_all([program], OUTPUT, level, LIMITS)
    assert isinstance(grade, Grade)
    assert grade.end is end, grade


def test_a_program_that_closes_its_output_and_never_ends(level: Level) -> None:
    program = "import os\nprint(2 * int(input()), flush=True)\nos.close(1)\nwhile True: pass"
    (grade,) = grade_all([program], OUTPUT, level, SHORT)
    assert isinstance(grade, Grade)
    assert grade.end is End.TIMEOUT, grade


def test_programs_end_first_when_memory_runs_out(level: Level) -> None:
    with Box(level, "candidate", limit_s=10.0, memory_mb=256) as box:
        box.ready()
        family = [box.pid, *descendants(box.pid)]
        assert {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in family} == {"1000\n"}


def test_slow_start_is_not_the_programs_time(level: Level) -> None:
    """The clock starts when the process is ready."""
    with Box(level, "candidate", limit_s=0.2, memory_mb=256) as box:
        time.sleep(0.5)
        box.ready()
        assert box.ask(b'"x = 1"', time.monotonic() + 30) == b"vnull"


def test_fractions_of_a_program_that_dies_on_the_way(level: Level) -> None:
    suite = read_suite({"test_list": [f"assert solve({x}) == {2 * x}" for x in range(4)]}, "")
    program = "import os\ndef solve(x): return 2 * x if x < 2 else os._exit(0)"
    (grade,) = grade_all([program], suite, level, LIMITS)
    assert isinstance(grade, Grade)
    assert (grade.passed, grade.total, grade.end) == (2, 4, End.DIED)
    assert grade.value(all_or_nothing=False) == 0.5
