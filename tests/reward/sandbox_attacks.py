"""Attacks S1 to S25 on the sandbox, and a way to run them.

Every attack is a program. It makes each attempt through `attempt`, which records the outcome. `evidence()` returns the
records, so a test can check that the attack was actually made. Its `solve` is wrong unless the attack makes it right.

As a script, with the name of a level and the places to attack, it runs the attacks and prints their outcomes. The tests
use this to run them as a user who is not root.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gspo.reward.sandbox import probe
from gspo.reward.sandbox.box import Box, DeadlinePassed, ProcessExited
from gspo.reward.sandbox.grade import Grade, Grader, Limits
from gspo.reward.sandbox.inside.values import decode, encode
from gspo.reward.sandbox.level import Level
from gspo.reward.sandbox.suite import Suite, read_suite

LIMITS = Limits(limit_s=10.0, memory_mb=256)
"""More than any program here needs on a busy machine."""
SHORT = replace(LIMITS, limit_s=0.6)
"""For programs that use up their time."""
CALLS = read_suite({"tests": [{"function": "solve", "args": [x], "expected": 2 * x} for x in (3, 10)]}, "")
ASSERTS = read_suite({"test_list": ["assert solve(3) == 6", "assert solve(10) == 20", "assert solve(0) == 0"]}, "")
OUTPUT = read_suite({"tests": [{"input": f"{x}\n", "output": f"{2 * x}\n"} for x in (3, 10)]}, "")

GOOD = "def solve(x):\n    return 2 * x"
BAD = "def solve(x):\n    return 2 * x + 1"
GOOD_SCRIPT = "print(2 * int(input()))"

START = """
import ctypes, errno, os, sys, time
NOTES = []
def attempt(name, action):
    try:
        value = action()
    except BaseException as error:
        NOTES.append([name, type(error).__name__, getattr(error, "errno", None) or str(error)[:100]])
    else:
        NOTES.append([name, "DONE", value if isinstance(value, (int, str)) else repr(value)[:2000]])
def evidence():
    return NOTES
def solve(x):
    return None
LIBC = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = LIBC.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
X86 = os.uname().machine == "x86_64"
def forge(line, wait=9):
    import gc
    token = next(o for o in gc.get_objects() if type(o).__name__ == "Channel")._token
    for fd in range(3, 21):
        try: os.write(fd, token + line + b"\\n")
        except OSError: continue
    time.sleep(wait)
"""

Notes = list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`check` looks at the notes; without one, the tests' verdict is all there is to see."""

    code: str
    ends: tuple[str, ...] = ("wrong",)
    check: Callable[[Notes, Mapping[str, Any]], None] | None = None
    suite: Suite = CALLS
    start: str = START
    good: str = GOOD
    """An honest program, which is graded next."""

    @property
    def limits(self) -> Limits:
        return SHORT if self.ends[0] == "timeout" else LIMITS


def refused(least: int) -> Callable[[Notes, Mapping[str, Any]], None]:
    """So many attempts were made, and none of them worked."""

    def check(notes: Notes, places: Mapping[str, Any]) -> None:
        assert len(notes) >= least, notes
        assert [note for note in notes if note[1] == "DONE"] == []
        assert places["secret"] not in json.dumps(notes)

    return check


def few(most: int) -> Callable[[Notes, Mapping[str, Any]], None]:
    """What was counted stayed small."""

    def check(notes: Notes, places: Mapping[str, Any]) -> None:
        assert [note[1] for note in notes] == ["DONE"]
        assert 0 < notes[0][2] <= most

    return check


def clean_environment(notes: Notes, places: Mapping[str, Any]) -> None:
    ((_, done, names),) = notes
    assert done == "DONE"
    assert set(names.split()) <= {"PATH", "LANG", "LC_CTYPE", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PWD"}


def found_nothing(notes: Notes, places: Mapping[str, Any]) -> None:
    """It looked at many objects, and the expected value was not among them."""
    assert notes[0][:2] == ["search", "DONE"]
    assert notes[0][2] > 1000
    assert notes[1][2] == "[]"


ATTACKS: dict[str, Attack] = {
    "S1 fork bomb": Attack(
        code="""
def bomb():
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
attempt("fork", bomb)
attempt("vfork", lambda: call(58) if X86 else os.fork())
attempt("clone", lambda: call(56 if X86 else 220, 17, 0, 0, 0, 0))
attempt("clone3", lambda: call(435, ctypes.create_string_buffer(88), 88))
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("system", lambda: {0: "it ran"}[os.system("true")])
attempt("subprocess", lambda: __import__("subprocess").run([sys.executable, "-c", "pass"], check=True))
attempt("multiprocessing", lambda: __import__("multiprocessing").Process(target=print).start())
attempt("exec", lambda: os.execv(sys.executable, ["python", "-c", "pass"]))
""",
        check=refused(9),
    ),
    "S2 ten thousand threads": Attack(
        code="""
import threading
def threads():
    threading.stack_size(65536)
    stop, count = threading.Event(), 0
    try:
        for _ in range(10_000):
            threading.Thread(target=stop.wait, daemon=True).start()
            count += 1
    except RuntimeError:
        pass
    stop.set()
    return count
attempt("threads", threads)
""",
        check=few(40),
    ),
    "S3 memory": Attack(
        code="""
attempt("one piece", lambda: bytearray(2**30))
attempt("many pieces", lambda: [bytearray(2**20) for _ in range(2000)])
attempt("mapped", lambda: __import__("mmap").mmap(-1, 2**30))
attempt("number", lambda: 1 << 2**34)
attempt("in 16 processes", lambda: [os.fork() or time.sleep(5) for _ in range(16)])
""",
        check=refused(5),
    ),
    "S4 endless loop, deaf to signals": Attack(
        code="""
import signal
def solve(x):
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        pass
""",
        ends=("timeout",),
    ),
    "S4 endless loop at import": Attack(code="while True: pass", ends=("timeout",)),
    "S5 sleep": Attack(code="def solve(x): time.sleep(1000)", ends=("timeout",)),
    "S6 power": Attack(code="def solve(x): return 3 ** (10**9)", ends=("timeout", "error")),
    "S6 regular expression": Attack(
        code="def solve(x):\n    import re\n    return re.match('(a+)+$', 'a' * 100 + 'b')", ends=("timeout",)
    ),
    "S6 sum": Attack(code="def solve(x): return sum(range(10**13))", ends=("timeout",)),
    "S7 writing": Attack(
        code="""
for place in ("~/.bashrc", "/tmp/PLANT", "../PLANT", "PLANT", "/PLANT", "/dev/shm/PLANT", "/dev/PLANT",
              "/var/tmp/PLANT", "PLACE/PLANT", "PLACE/file", "/usr/lib/PLANT",
              os.path.dirname(os.__file__) + "/json/__init__.py"):
    for mode in ("a", "w", "x"):
        attempt(mode + place, lambda: open(os.path.expanduser(
            place.replace("PLACE", PLACE).replace("PLANT", PLANT)), mode))
file = PLACE + "/file"
for name, action in (
    ("remove", lambda: os.remove(file)), ("rename", lambda: os.rename(file, file + "2")),
    ("link", lambda: os.link(file, file + "2")),
    ("truncate", lambda: os.truncate(file, 0)), ("empty", lambda: os.open(file, os.O_RDONLY | os.O_TRUNC)),
    ("chmod", lambda: os.chmod(file, 0o777)), ("chown", lambda: os.chown(file, os.getuid(), os.getgid())),
    ("utime", lambda: os.utime(file)), ("xattr", lambda: os.setxattr(file, "user.x", b"1")),
    ("mkdir", lambda: os.mkdir(PLACE + "/d")), ("symlink", lambda: os.symlink(file, PLACE + "/l")),
    ("fifo", lambda: os.mkfifo(PLACE + "/p")), ("rmdir", lambda: os.rmdir(PLACE)),
):
    attempt(name, action)
""",
        check=refused(49),
    ),
    "S8 reading": Attack(
        code="""
import glob
def first(pattern):
    return [open(name, "rb").read(10**6) for name in glob.glob(pattern)][0]
for place in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "~/.ssh/id_rsa", "~/.cache/huggingface/token", "~/.bashrc",
              "/proc/%d/environ" % PID, "/proc/%d/cmdline" % PID, "/proc/%d/mem" % PID, "/proc/1/environ",
              "/proc/self/mem", "/proc/self/environ", "/proc/self/maps", "/proc/version", "/sys/kernel/notes", FILE,
              PLACE + "/file"):
    attempt(place, lambda: open(os.path.expanduser(place), "rb").read(10**6))
for pattern in ("/proc/*/environ", "/proc/*/cmdline", "/home/*", "/root/*", "/tmp/*", "/work/*", "/etc/s*",
                PLACE + "/*"):
    attempt(pattern, lambda: first(pattern))
for place in ("/tmp", "/proc", "/home", "/root", "/dev/fd", "/dev/shm", PLACE):
    attempt(place, lambda: os.listdir(place))
""",
        check=refused(32),
    ),
    "S9 environment": Attack(
        code="""attempt("environ", lambda: " ".join(os.environ))""",
        check=clean_environment,
    ),
    "S10 network": Attack(
        code="""
import socket
for name, family, address in (
    ("TCP", socket.AF_INET, ("127.0.0.1", TCP)), ("IPv6", socket.AF_INET6, ("::1", TCP)),
    ("unix", socket.AF_UNIX, PLACE + "/socket"), ("abstract", socket.AF_UNIX, chr(0) + PLANT),
):
    attempt(name, lambda: socket.socket(family).connect(address))
    attempt(name + " datagram", lambda: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", address))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("DNS", lambda: socket.getaddrinfo("example.com", 80))
attempt("netlink", lambda: socket.socket(16, socket.SOCK_RAW))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packet", lambda: socket.socket(17, socket.SOCK_RAW))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
attempt("pair of other families", lambda: socket.socketpair(socket.AF_INET))
def through_a_pair(address):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", address)
attempt("datagram through a pair", lambda: through_a_pair(chr(0) + PLANT + "d"))
attempt("message through a pair", lambda: socket.socketpair()[0].sendmsg([b"x"]))
attempt("URL", lambda: __import__("urllib.request").request.urlopen("http://127.0.0.1:%d" % TCP))
""",
        check=refused(18),
    ),
    "S11 sys.exit": Attack(code="def solve(x): sys.exit(0)", ends=("error",)),
    "S11 SystemExit at import": Attack(code="raise SystemExit", ends=("error",)),
    "S11 os._exit": Attack(code="def solve(x): os._exit(0)", ends=("died",)),
    "S11 os._exit at import": Attack(code="os._exit(0)", ends=("died",)),
    "S11 atexit": Attack(code="import atexit\natexit.register(os._exit, 0)\nsys.exit(0)", ends=("error",)),
    "S11 abort": Attack(code="def solve(x): os.abort()", ends=("died",)),
    "S11 segmentation fault": Attack(code="def solve(x): ctypes.string_at(0)", ends=("died",)),
    "S11 killing itself": Attack(code="def solve(x): os.kill(os.getpid(), 9)", ends=("died",)),
    "S11 stopping itself": Attack(code="def solve(x): os.kill(os.getpid(), 19)", ends=("timeout",)),
    "S11 KeyboardInterrupt": Attack(code="def solve(x): raise KeyboardInterrupt", ends=("error",)),
    "S11 exception that cannot be shown": Attack(
        code="class E(Exception):\n    def __str__(self): os._exit(0)\ndef solve(x): raise E", ends=("died", "error")
    ),
    "S12 equal to everything": Attack(
        code=(
            "class A:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __eq__\ndef solve(x): return A()"
        ),
        suite=ASSERTS,
    ),
    "S12 int that lies": Attack(
        code=(
            "class A(int):\n"
            "    def __eq__(self, other): return True\n"
            "    __hash__ = int.__hash__\n"
            "def solve(x): return A(1)"
        ),
        suite=ASSERTS,
    ),
    "S12 str that lies": Attack(
        code=(
            "class A(str):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef solve(x): return A('1')"
        ),
        suite=ASSERTS,
    ),
    "S12 float that lies": Attack(
        code=(
            "class A(float):\n"
            "    def __eq__(self, other): return True\n"
            "    __float__ = lambda s: 6.0\n"
            "def solve(x): return A(1)"
        ),
        suite=ASSERTS,
    ),
    "S12 lying class": Attack(
        code=(
            "class A:\n    __class__ = property(lambda s: int)\n    def __int__(s): return 6\ndef solve(x): return A()"
        ),
        suite=ASSERTS,
        ends=("wrong", "error"),
    ),
    "S12 list that lies": Attack(
        code=(
            "class A(list):\n"
            "    def __eq__(self, other): return True\n"
            "    def __iter__(self): return iter([6])\n"
            "def solve(x): return A()"
        ),
        suite=ASSERTS,
    ),
    "S12 nan": Attack(code="def solve(x): return float('nan')", suite=ASSERTS),
    "S12 infinity": Attack(code="def solve(x): return float('inf')", suite=ASSERTS),
    "S12 minus zero": Attack(code="def solve(x): return -0.0", suite=ASSERTS),
    "S12 huge int": Attack(code="def solve(x): return 7 ** 20_000", suite=ASSERTS),
    "S12 int too huge": Attack(code="def solve(x): return 1 << 10**8", suite=ASSERTS, ends=("error", "timeout")),
    "S12 generator": Attack(code="def solve(x): yield 2 * x", suite=ASSERTS),
    "S12 recursive list": Attack(code="def solve(x): a = []; a.append(a); return a", suite=ASSERTS, ends=("error",)),
    "S12 recursive dict": Attack(code="def solve(x): a = {}; a[0] = a; return a", suite=ASSERTS, ends=("error",)),
    "S12 bool for everything": Attack(code="def solve(x): return True", suite=ASSERTS),
    "S13 printing": Attack(
        code=(
            "def solve(x):\n"
            "    print('PASS'); print('v6'); print('v%d' % (2 * x), flush=True)\n"
            "    os.write(1, b'v6\\n'); os.write(2, b'v6\\n')"
        )
    ),
    "S13 writing everywhere": Attack(
        code=(
            "def solve(x):\n"
            "    for fd in range(21):\n"
            "        try: os.write(fd, b'v%d\\n' % (2 * x))\n"
            "        except OSError: pass"
        ),
        ends=("protocol",),
    ),
    "S13 writing with the token": Attack(
        code="def solve(x): forge(b'v6', wait=0)", ends=("protocol", "wrong"), suite=ASSERTS
    ),
    "S13 right answers with the token, then garbage": Attack(
        code="def solve(x): forge(b'v%d\\nv%d' % (2 * x, 2 * x), wait=0)", ends=("protocol",), suite=ASSERTS
    ),
    "S13 a line ahead of time": Attack(
        code="for fd in range(3, 21):\n    try: os.write(fd, b'v6\\nv20\\n')\n    except OSError: pass",
        ends=("protocol",),
    ),
    "S13 a verdict of its own": Attack(
        code="""
def solve(x):
    for fd in range(3, 21):
        try: os.write(fd, b'!{"d":[["passed",2],["failed",0],["why",""],["gone",""],["broken",""]]}\\n')
        except OSError: pass
""",
        ends=("protocol",),
    ),
    "S13 an answer without an end": Attack(
        code=(
            "def solve(x):\n    for fd in range(3, 21):\n        try: os.write(fd, b'v6')\n        except OSError: pass"
        ),
        ends=("protocol",),
    ),
    "S13 an endless answer": Attack(
        code="""
def solve(x):
    while True:
        for fd in range(3, 21):
            try: os.write(fd, b'1' * 65536)
            except OSError: pass
""",
        ends=("output", "timeout"),
    ),
    "S13 broken text": Attack(code="def solve(x): forge(b'v\\xff\\x00')", ends=("protocol",)),
    "S13 broken JSON": Attack(code="def solve(x): forge(b'v[[1,{}')", ends=("protocol",)),
    "S13 unknown kind": Attack(code="def solve(x): forge(b'?6')", ends=("protocol",)),
    "S13 deep JSON": Attack(code="def solve(x): forge(b'v' + b'[' * 50_000 + b']' * 50_000)", ends=("protocol",)),
    "S13 wide JSON": Attack(code="def solve(x): forge(b'v' + b'[[],' * 10 + b'6')", ends=("protocol",)),
    "S13 broken exception": Attack(code="def solve(x): forge(b'e6')", ends=("protocol",)),
    "S13 exception that ends the judge": Attack(
        code='def solve(x): forge(b\'e["SystemExit","0",[0],0]\')', ends=("timeout",)
    ),
    "S13 exception that takes arguments": Attack(
        code='def solve(x): forge(b\'e["ExceptionGroup","0",[0],0]\')', ends=("timeout",)
    ),
    "S13 broken error at import": Attack(code="forge(b'e[[[1')", ends=("protocol",)),
    "S13 deep error at import": Attack(code="forge(b'e' + b'[' * 10**5)", ends=("protocol",)),
    "S13 huge number as an error": Attack(code="forge(b'e[' + b'9' * 10**6 + b',\"\"]')", ends=("protocol",)),
    "S13 closing everything": Attack(code="def solve(x): os.closerange(0, 64)", ends=("died",)),
    "S13 turning stdout round": Attack(
        code="def solve(x):\n    for fd in range(3, 21):\n        try: os.dup2(1, fd)\n        except OSError: pass",
        ends=("timeout", "died"),
    ),
    "S14 searching for the answer": Attack(
        code="""
import gc, inspect
def search():
    seen, hits, stack = set(), [], [*gc.get_objects(), *sys.modules.values()]
    for frame in [sys._getframe(), *sys._current_frames().values()]:
        while frame is not None:
            stack += [frame, frame.f_globals, frame.f_locals, frame.f_code.co_consts]
            frame = frame.f_back
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        mark = "ETAERT" if isinstance(item, str) else b"ETAERT"
        if isinstance(item, (str, bytes)) and len(item) > 9 and mark in item[::-1]:
            hits.append(item)
        if len(seen) < 300_000:
            stack += gc.get_referents(item)
    return seen, hits
seen, hits = search()
attempt("search", lambda: len(seen))
attempt("hits", lambda: repr([h for h in hits if isinstance(h, str) and h.startswith("TREATE")]))
def solve(x):
    hits = [h for h in search()[1] if h.startswith("TREATE")]
    return hits[0] if hits else None
""",
        check=found_nothing,
        suite=read_suite({"test_list": ["assert solve(3) == 'TREATE-' + 'three-and-thirty'"]}, ""),
        good="def solve(x): return 'TREATE-three-and-thirty'",
    ),
    "S14 patched built-ins": Attack(
        code="""
import builtins, json
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.len = lambda a: 2
builtins.print = builtins.repr = lambda *a: "6"
json.dumps = lambda *a, **k: "6"
import _json
_json.encode_basestring_ascii = lambda a: "6"
def solve(x): return "no"
""",
        ends=("wrong", "error", "died", "protocol"),
    ),
    "S14 patched encoder": Attack(
        code="""
for name, module in list(sys.modules.items()):
    if name.startswith("gspo"):
        for key in list(vars(module)):
            if key == "encode":
                usual = module.encode
                setattr(module, key, lambda value, refer, usual=usual: "6" if value == "no" else usual(value, refer))
def solve(x): return "no"
""",
        suite=ASSERTS,
    ),
    "S14 trace and import hook": Attack(
        code="""
class Hook:
    def find_spec(self, *a): return None
sys.meta_path.insert(0, Hook())
def tracer(frame, event, arg):
    for name in frame.f_locals:
        frame.f_locals[name] = 6
    return tracer
sys.settrace(tracer)
sys.setprofile(tracer)
def solve(x): return "no"
""",
        ends=("wrong", "error", "died"),
    ),
    "S14 files that Python would import": Attack(
        code="""
for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "math.py", "random.py"):
    for folder in (".", "/", *sys.path, os.path.dirname(os.__file__)):
        attempt(folder + name, lambda: open(os.path.join(folder, name), "w"))
""",
        check=refused(18),
    ),
    "S15 flood of output": Attack(
        code="import os\nwhile True: os.write(1, b'x' * 65536)", suite=OUTPUT, start="", ends=("output",)
    ),
    "S15 flood of lines": Attack(code="while True: print(input)", suite=OUTPUT, start="", ends=("output",)),
    "S15 flood of errors": Attack(
        code="import os, sys\nfor _ in range(2**12): os.write(2, b'x' * 2**18)\nprint(7)", suite=OUTPUT, start=""
    ),
    "S15 flood in a function": Attack(code="def solve(x):\n    for _ in range(2**12): os.write(1, b'x' * 2**18)"),
    "S15 odd characters": Attack(
        code="import os\nos.write(1, b'\\x1b[31m\\x1b]0;title\\x07\\x00\\xff\\xfe\\ud800' + bytes(range(256)))",
        suite=OUTPUT,
        start="",
    ),
    "S15 typing into the terminal": Attack(
        code="""
import fcntl
for fd in range(3):
    attempt("TIOCSTI %d" % fd, lambda: fcntl.ioctl(fd, 0x5412, b"x"))
attempt("tty", lambda: open("/dev/tty", "r+b", buffering=0))
attempt("console", lambda: open("/dev/console", "r+b", buffering=0))
""",
        check=refused(5),
    ),
    "S16 filling the disk": Attack(
        code="""
def fill(folder):
    for number in range(10**6):
        with open("%s/PLANT-%d" % (folder, number), "wb") as file:
            file.write(bytes(2**20))
def nodes(folder):
    for number in range(10**6):
        os.mkdir("%s/PLANT-%d" % (folder, number))
def sparse(folder):
    with open(folder + "/PLANT-sparse", "wb") as file:
        file.truncate(2**40)
for folder in ("/tmp", ".", "/", "/dev", "/dev/shm", "/var/tmp", "/run", "/proc", PLACE):
    attempt("fill " + folder, lambda: fill(folder))
    attempt("nodes " + folder, lambda: nodes(folder))
    attempt("sparse " + folder, lambda: sparse(folder))
    attempt("device " + folder, lambda: os.mknod(folder + "/PLANT-d", 0o60666, os.makedev(8, 0)))
    attempt("shadow " + folder, lambda: os.symlink("/etc/shadow", folder + "/result.json"))
attempt("in memory", lambda: os.memfd_create("x"))
""",
        check=refused(46),
    ),
    "S17 bombs": Attack(
        code="""
import gzip, pickle
member = gzip.compress(bytes(2**22))
attempt("gzip", lambda: gzip.decompress(member * 200))
attempt("nesting", lambda: eval("[" * 500 + "]" * 500))
""",
        check=refused(2),
        ends=("wrong", "timeout"),
    ),
    "S17 pickle as an answer": Attack(
        code="""
import pickle
class Evil:
    def __reduce__(self): return (os.mkdir, (PLACE + "/pickled",))
def solve(x): return pickle.dumps(Evil())
""",
    ),
    "S17 nested answer": Attack(
        code="def solve(x):\n    a = 6\n    for _ in range(100_000): a = [a]\n    return a", ends=("error",)
    ),
    "S17 colliding answer": Attack(
        code="def solve(x): return {i * (2**61 - 1) for i in range(1, 4000)}", ends=("wrong", "error", "timeout")
    ),
    "S18 daemon": Attack(
        code="""
import threading
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)
attempt("double fork", daemon)
attempt("setsid", os.setsid)
attempt("setpgid", lambda: os.setpgid(0, 0) if os.getpgrp() != os.getpid() else call(109 if X86 else 154, 0, 0))
attempt("nohup", lambda: os.execvp("nohup", ["nohup", "sleep", "30"]))
attempt("outliving its parent", lambda: call(157 if X86 else 167, 1, 0, 0, 0, 0))
threading.Thread(target=time.sleep, args=(30,)).start()
""",
        check=refused(5),
    ),
    "S19 other processes and the kernel": Attack(
        code="""
import signal, resource
for number in (0, signal.SIGTERM, signal.SIGKILL):
    for pid in (-1, 0, 1, PID, os.getppid() or 1):
        attempt("kill %d %d" % (pid, number), lambda: os.kill(pid, number))
attempt("killpg", lambda: os.killpg(os.getpgrp() or 1, 0))
attempt("pidfd", lambda: os.pidfd_open(PID))
attempt("tkill", lambda: call(200 if X86 else 130, PID, 0))
attempt("queue", lambda: call(129 if X86 else 138, PID, 0, ctypes.create_string_buffer(128)))
attempt("owner", lambda: __import__("fcntl").fcntl(0, 8, PID))
attempt("ptrace", lambda: call(101 if X86 else 117, 16, PID, 0, 0))
attempt("traceme", lambda: call(101 if X86 else 117, 0, 0, 0, 0))
attempt("read memory", lambda: call(310 if X86 else 270, PID, 0, 0, 0, 0, 0))
attempt("limits", lambda: resource.prlimit(PID, resource.RLIMIT_CPU, (1, 1)))
attempt("more memory", lambda: resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)))
attempt("affinity", lambda: os.sched_setaffinity(PID, [0]))
attempt("own affinity", lambda: os.sched_setaffinity(0, [0]))
attempt("own policy", lambda: os.sched_setscheduler(0, 5, os.sched_param(0)))
attempt("own policy, anew", lambda: call(314 if X86 else 274, 0, (ctypes.c_uint32 * 14)(56, 5), 0))
attempt("own parameters", lambda: os.sched_setparam(0, os.sched_param(0)))
attempt("own niceness", lambda: os.nice(19))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, PID, 19))
attempt("root of 1", lambda: os.listdir("/proc/1/root"))
attempt("unshare", lambda: call(272 if X86 else 97, 0x10000000))
attempt("setns", lambda: call(308 if X86 else 268, 0, 0))
attempt("mount", lambda: call(165 if X86 else 40, b"none", b"/", b"tmpfs", 0, 0))
attempt("umount", lambda: call(166 if X86 else 39, b"/", 0))
attempt("new mount", lambda: call(430, b"tmpfs", 0))
attempt("chroot", lambda: os.chroot("/"))
attempt("new user namespace", lambda: call(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0))
attempt("clone3", lambda: call(435, (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17), 88))
attempt("io_uring", lambda: call(425, 8, ctypes.create_string_buffer(120)))
attempt("bpf", lambda: call(321 if X86 else 280, 0, 0, 0))
attempt("perf", lambda: call(298 if X86 else 241, 0, 0, 0, 0, 0))
attempt("keys", lambda: call(250 if X86 else 219, 0, 0, 0))
attempt("add a key", lambda: call(248 if X86 else 217, b"user", b"PLANT", b"x", 1, -3))
attempt("userfaultfd", lambda: call(323 if X86 else 282, 0))
attempt("shared memory", lambda: call(29 if X86 else 194, 4242, 4096, 0o1666))
attempt("semaphores", lambda: call(64 if X86 else 190, 4242, 1, 0o1666))
attempt("queues", lambda: call(68 if X86 else 186, 4242, 0o1666))
attempt("handles", lambda: call(304 if X86 else 265, 0, 0, 0))
attempt("in memory", lambda: os.memfd_create("x"))
attempt("exec in memory", lambda: call(322 if X86 else 281, 0, b"", 0, 0, 0x1000))
attempt("setuid", lambda: os.setuid(0) or 1 / os.getuid())
attempt("su", lambda: os.execv("/usr/bin/su", ["su"]))
attempt("new system call", lambda: call(500))
attempt("32-bit system call", lambda: call(0x40000000 + 39))
""",
        check=refused(56),
    ),
    "S23 memory between runs": Attack(
        code="""
import fcntl, mmap, resource
path = os.path.dirname(os.__file__) + "/this.py"
fd = os.open(path, os.O_RDONLY)
buffer, moved = ctypes.create_string_buffer(4096), ctypes.c_int64(0)
LIBC.mmap.restype = ctypes.c_void_p
def mapped(flags):
    place = LIBC.mmap(None, ctypes.c_size_t(4096), 1, 1 | flags, fd, ctypes.c_long(0))
    if place == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return ctypes.c_void_p(place)
page, size = mapped(0), ctypes.c_size_t(4096)
for advice in range(6):
    attempt("fadvise %d" % advice, lambda: os.posix_fadvise(fd, 0, 0, advice))
attempt("readahead", lambda: call(187 if X86 else 213, fd, ctypes.c_long(0), size))
attempt("mincore", lambda: call(27 if X86 else 232, page, size, buffer))
attempt("cachestat", lambda: call(451, fd, (ctypes.c_uint64 * 2)(0, 4096), buffer, 0))
attempt("preadv2", lambda: os.preadv(fd, [bytearray(10)], 0, os.RWF_NOWAIT))
attempt("pwritev2", lambda: call(328 if X86 else 287, fd, None, 0, 0, 0, 0))
reader, writer = os.pipe()
attempt("splice", lambda: call(275 if X86 else 76, fd, ctypes.byref(moved), writer, None, ctypes.c_size_t(1), 2))
attempt("vmsplice", lambda: call(278 if X86 else 75, writer, None, 0, 0))
for advice in (3, 9, 12, 13, 20, 21, 22, 23, 24, 25, 100, 101):
    attempt("madvise %d" % advice, lambda: call(28 if X86 else 233, page, size, advice))
attempt("process_madvise", lambda: call(440, 0, None, 0, 3, 0))
for name, flag in (("locked", 0x2000), ("populated", 0x8000), ("huge", 0x40000)):
    attempt(name, lambda: mapped(flag))
attempt("mlock", lambda: call(149 if X86 else 228, page, size))
attempt("mlock2", lambda: call(325 if X86 else 284, page, size, 1))
attempt("mlockall", lambda: call(151 if X86 else 230, 1))
attempt("sync", lambda: call(162 if X86 else 81))
attempt("syncfs", lambda: call(306 if X86 else 267, fd))
attempt("sync range", lambda: call(277 if X86 else 84, fd, ctypes.c_long(0), ctypes.c_long(0), 0))
attempt("node of a page", lambda: call(239 if X86 else 236, buffer, None, 0, page, 3))
attempt("page faults", lambda: resource.getrusage(resource.RUSAGE_SELF))
attempt("merging", lambda: call(157 if X86 else 167, 67, 1, 0, 0, 0))
attempt("access time", lambda: os.utime(path))
attempt("version of a file", lambda: fcntl.ioctl(fd, 0x80087601, bytes(8)))
attempt("flags of a file", lambda: fcntl.ioctl(fd, 0x80086601, bytes(8)))
attempt("hint", lambda: fcntl.fcntl(fd, 1036, bytes(8)))
attempt("hint of others", lambda: fcntl.fcntl(fd, 1035, bytes(8)))
""",
        check=refused(43),
    ),
    "S24 signs to a neighbor": Attack(
        code="""
import fcntl
path = os.path.dirname(os.__file__) + "/this.py"
fd = os.open(path, os.O_RDONLY)
for name, action in (("exclusive", fcntl.LOCK_EX), ("shared", fcntl.LOCK_SH), ("free", fcntl.LOCK_UN)):
    attempt("flock " + name, lambda: fcntl.flock(fd, action | fcntl.LOCK_NB))
for command in (5, 6, 7, 36, 37, 38):
    attempt("lock %d" % command, lambda: fcntl.fcntl(fd, command, bytes(32)))
attempt("lease", lambda: fcntl.fcntl(fd, 1024, 0))
attempt("look for a lease", lambda: fcntl.fcntl(fd, 1025))
attempt("notice", lambda: fcntl.fcntl(os.open(os.path.dirname(path), os.O_RDONLY), 1026, 1))
attempt("inotify", lambda: call(294 if X86 else 26, 0))
attempt("fanotify", lambda: call(300 if X86 else 262, 0, 0))
attempt("semaphore", lambda: call(65 if X86 else 193, 0, ctypes.create_string_buffer(6), 1))
attempt("semaphore with a deadline", lambda: call(220 if X86 else 192, 0, ctypes.create_string_buffer(6), 1, None))
attempt("send", lambda: call(69 if X86 else 189, 0, ctypes.create_string_buffer(16), 1, 0o4000))
attempt("receive", lambda: call(70 if X86 else 188, 0, ctypes.create_string_buffer(16), 1, 0, 0o4000))
attempt("list of segments", lambda: call(31 if X86 else 195, 0, 14, ctypes.create_string_buffer(256)))
attempt("detach", lambda: call(67 if X86 else 197, None))
attempt("queue", lambda: call(240 if X86 else 180, b"PLANT", 0o102, 0o666, None))
attempt("load", lambda: call(99 if X86 else 179, ctypes.create_string_buffer(256)))
attempt("load, from a file", os.getloadavg)
attempt("time of the trainer", lambda: time.clock_gettime((~PID << 3) | 2))
attempt("session of the trainer", lambda: os.getsid(PID))
attempt("group of the trainer", lambda: os.getpgid(PID))
attempt("policy of the trainer", lambda: os.sched_getscheduler(PID))
attempt("large pipe", lambda: fcntl.fcntl(os.pipe()[0], 1031, 2**20))
attempt("timer", lambda: call(222 if X86 else 107, 1, None, ctypes.create_string_buffer(8)))
""",
        check=refused(29),
    ),
    "S25 naps": Attack(code="def solve(x):\n    while True: time.sleep(1e-6)", ends=("timeout",)),
    "S25 giving way": Attack(code="def solve(x):\n    while True: os.sched_yield()", ends=("timeout",)),
    "S25 threads that wait for each other": Attack(
        code="""
import threading
def solve(x):
    threading.stack_size(2**18)
    turn = threading.Condition()
    def wait():
        while True:
            with turn: turn.notify_all(); turn.wait()
    for _ in range(20): threading.Thread(target=wait, daemon=True).start()
    wait()
""",
        ends=("timeout",),
    ),
    "S25 threads that compute": Attack(
        code="""
import hashlib, threading
def solve(x):
    threading.stack_size(2**18)
    data = bytes(2**20)
    def work():
        while True: hashlib.sha256(data)
    for _ in range(20): threading.Thread(target=work, daemon=True).start()
    work()
""",
        ends=("timeout", "died"),
    ),
    "S25 page faults": Attack(
        code="""
import mmap
def solve(x):
    memory = mmap.mmap(-1, 2**26)
    while True:
        for at in range(0, 2**26, 4096): memory[at] = 1
        memory.madvise(mmap.MADV_DONTNEED)
""",
        ends=("timeout",),
    ),
    "S25 a pipe that nobody fills": Attack(code="def solve(x): os.read(os.pipe()[0], 1)", ends=("timeout",)),
    "S25 a first thread that ends": Attack(
        code="""
import threading
def solve(x):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    call(60 if X86 else 93, 0)
""",
        ends=("timeout", "died"),
    ),
    "S25 a name like another's figures": Attack(
        code="""
def solve(x):
    call(157 if X86 else 167, 15, b") S 1 (0 0 0)", 0, 0, 0)
    while True: pass
""",
        ends=("timeout",),
    ),
    "S25 deaf in the kernel": Attack(
        code="def solve(x):\n    while True: call(324 if X86 else 283, 1, 0, 0)", ends=("timeout", "error")
    ),
    "S20 the tests it knows": Attack(code="def solve(x): return {3: 6}.get(x)"),
    "S20 syntax error": Attack(code="def solve(x:\n    return 2 * x", ends=("error",)),
    "S20 null character": Attack(code="def solve(x): return 2 * x\x00", ends=("error",)),
    "S20 nested too deeply": Attack(code="x = " + "(" * 5000 + ")" * 5000, ends=("error", "died")),
    "S20 another name": Attack(code="del solve\ndef resolve(x): return 2 * x", ends=("error",)),
    "S20 no function": Attack(code="solve = 6", ends=("error",)),
    "S20 empty": Attack(code=" \n\t\n", start="", ends=("empty",)),
}


def filled(attack: Attack, places: Mapping[str, Any]) -> str:
    """The program, with the places it attacks."""
    head = "".join(f"{key.upper()} = {value!r}\n" for key, value in places.items() if key != "secret")
    return f"{head}{attack.start}{attack.code}" if attack.start else attack.code


def graded(
    attack: Attack, level: Level, places: Mapping[str, Any]
) -> tuple[Grade | Exception, float, Grade | Exception]:
    """The attack's grade, the seconds it took, and the grade of the honest program that comes after it."""
    with Grader(attack.suite, level, attack.limits) as grader:
        start = time.monotonic()
        grade = grader.grade(filled(attack, places))
        seconds = time.monotonic() - start
        return grade, seconds, grader.grade(GOOD_SCRIPT if attack.suite is OUTPUT else attack.good)


def notes_of(attack: Attack, level: Level, places: Mapping[str, Any], limit_s: float = 120.0) -> Notes:
    """What the attack noted."""
    with Box(level, "candidate", limit_s=limit_s, memory_mb=LIMITS.memory_mb) as box:
        box.ready()
        deadline = time.monotonic() + limit_s
        for line in (encode(filled(attack, places), len), '["name", "evidence"]', '["call", {"r": 0}, [], {"d": []}]'):
            answer = box.ask(line.encode(), deadline)
            assert answer[:1] == b"v", answer
        notes: Notes = decode(answer[1:].decode(), repr)
        return notes


def levels() -> list[Level | str]:
    """Every level of this machine, or why it is missing."""
    python, own_users = probe._interpreter("", False)
    found: list[Level | str] = []
    for level in probe._candidates(python, own_users):
        if isinstance(level, Level) and "no network namespace" in level.detail:
            continue
        found.append(level if isinstance(level, str) else probe.flaw(level) or level)
    return found


def main() -> None:
    number, places = int(sys.argv[1]), json.loads(sys.argv[2])
    (level,) = [level for level in levels() if isinstance(level, Level) and level.number == number]
    result: dict[str, Any] = {}
    for name, attack in ATTACKS.items():
        if attack.check is None:
            continue
        try:
            grade, seconds, _ = graded(attack, level, places)
            end = grade.end if isinstance(grade, Grade) else repr(grade)
            result[name] = {"end": end, "seconds": seconds, "notes": notes_of(attack, level, places)}
        except (AssertionError, DeadlinePassed, ProcessExited) as error:
            result[name] = {"end": repr(error), "seconds": 0.0, "notes": []}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
