"""A hand-assembled seccomp filter for the program's system calls, on x86_64 and aarch64.

In: this process's id. Out: a permanent filter. Invariant: the program cannot start a process, execute another program,
signal other processes, open a socket that reaches anything, create namespaces, mount, share memory, change file
attributes, lock files, observe the page cache or the machine's load, or change its scheduling. Threads, memory, and
reading and writing open files are allowed. A denied call returns EPERM. Calls newer than this table, and clone3, whose
flags a filter cannot read, return ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables below, and the kernel's audit constant for the architecture."""

DENIED = {
    # network
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # starting and affecting processes
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # scheduling: a program that slows itself down would look like one on a busy machine
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    # the page cache of Python's files, which all sandboxes share: loading, evicting and querying pages
    "readahead": (187, 213),
    "fadvise64": (221, 223),
    "mincore": (27, 232),
    "cachestat": (451, 451),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "sync_file_range": (277, 84),
    "remap_file_pages": (216, 234),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "mlockall": (151, 230),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # activity of the machine and other processes: a covert channel between concurrent programs
    "getrusage": (98, 165),  # reports major page faults
    "sysinfo": (99, 179),
    "flock": (73, 32),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "timer_create": (222, 107),  # the limit is shared by all processes of a user
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # large kernel subsystems
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "personality": (135, 92),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    # file operations that Landlock does not cover
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "truncate": (76, 45),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, -1),
    "utimes": (235, -1),
    "utimensat": (280, 88),
    "futimesat": (261, -1),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    # objects that outlive a process
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmdt": (67, 197),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),  # works without `semget`, because identifiers can be guessed
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
}
UNKNOWN = {"clone3": (435, 435), "openat2": (437, 437)}
"""Their arguments are in memory, which a filter cannot read."""
NEWEST = 468
"""System calls from this number on are newer than this table."""

ONLY_SELF = {"kill": (62, 129), "tgkill": (234, 131)}
"""Allowed if the first argument is this process."""
ONLY_ZERO = {
    "prlimit64": (302, 261),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_getattr": (315, 275),
    "sched_rr_get_interval": (148, 127),
}
"""Allowed if the first argument is 0, which means this process."""
OWN_CLOCKS = {"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)}
"""Allowed for nonnegative clock ids. A negative one is the CPU time of another process, or a device."""
COMMANDS = {
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not: locks, leases, notifications,
    # signal owners, hints that persist on the file, pipe sizes (their limit is shared by all sandboxes of a user).
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 1030, 1032)),
    # TCGETS, TIOCGWINSZ (is it a terminal?), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Not: terminal input injection,
    # signal owners, flags and ids that persist on the file, a file's location on the disk.
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (names memory). Not: outliving the parent, merging memory with other
    # processes, core scheduling.
    "prctl": ((157, 167), 0, (15, 16, 0x53564D41)),
    # What allocators need. Not: readahead, paging out, merging memory with other processes, huge pages of files.
    "madvise": ((28, 233), 2, (0, 1, 2, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19, 102, 103)),
}
"""System call number, index of the checked argument, and its allowed values."""

_CLONE, _CLONE_THREAD = (56, 220), 0x10000
_OPEN, _OPENAT = (2, -1), (257, 56)
_O_TRUNC, _O_TRUNC_OR_WRITE = 0o1000, 0o1003
_SOCKETPAIR, _AF_UNIX = (53, 199), 1
_SENDTO = (44, 206)
_MMAP, _MAP_LOCKED_POPULATE_HUGETLB = (9, 222), 0x2000 | 0x8000 | 0x40000

# SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, and SECCOMP_RET_ERRNO with the error number in its low half.
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NOTIFY = 0x7FC00000
_PR_SET_NO_NEW_PRIVS, _SECCOMP, _FILTER, _NEW_LISTENER = 38, (317, 277), 1, 8
# SECCOMP_IOCTL_NOTIF_RECV and _SEND, which contain the sizes of their structures: 80 and 24 bytes.
_NOTIFICATION_RECEIVE, _NOTIFICATION_SEND = 0xC0502100, 0xC0182101


def install() -> None:
    """Put this thread, and every thread it starts, under the filter."""
    _set(assemble(os.uname().machine, os.getpid()), 0)


def ask_for_threads() -> int:
    """Make each new thread wait for a decision of the process that reads the returned descriptor."""
    column, _ = _machine(os.uname().machine)
    steps = [_argument(0), _and(_CLONE_THREAD), *_if(_CLONE_THREAD, _NOTIFY), _return(_ALLOW)]
    return _set(b"".join([_load(0), *_when(_CLONE[column], steps), _return(_ALLOW)]), _NEW_LISTENER)


def answer(descriptor: int, allowed: Callable[[], bool]) -> None:
    """Wait for a request to start a thread, and allow or deny it."""
    question = bytearray(80)
    fcntl.ioctl(descriptor, _NOTIFICATION_RECEIVE, question)
    number = bytes(question[:8])
    # Flag 1 continues the call. EAGAIN is also the kernel's own answer to one thread too many, so Python reports "can't
    # start new thread".
    verdict = struct.pack("qiI", 0, 0, 1) if allowed() else struct.pack("qiI", 0, -errno.EAGAIN, 0)
    fcntl.ioctl(descriptor, _NOTIFICATION_SEND, bytearray(number + verdict))


def _set(code: bytes, flags: int) -> int:
    column, _ = _machine(os.uname().machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    # `buffer` is a variable so that it is still alive when the kernel reads the program at this address.
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel requires this of an unprivileged process: a filter must not be able to confuse a setuid program.
    result = libc.prctl(*map(ctypes.c_ulong, (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
    if not result:
        arguments = (_SECCOMP[column], _FILTER, flags, ctypes.addressof(program))
        result = libc.syscall(*map(ctypes.c_ulong, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))
    return int(result)


def _machine(name: str) -> tuple[int, int]:
    if name not in MACHINES:
        raise OSError("seccomp: no table of system calls for " + name)
    return MACHINES[name]


def assemble(machine: str, pid: int) -> bytes:
    """The filter as BPF bytecode: 8 bytes per instruction."""
    column, architecture = _machine(machine)
    # Check the architecture first: a process can switch to the 32-bit ABI, where the same numbers are other calls.
    code = [
        *(_load(4), _jump(_EQUAL, architecture, 1, 0), _return(_KILL)),
        *(_load(0), _jump(_AT_LEAST, NEWEST, 0, 1), _return(_ENOSYS)),  # includes the x32 calls, which start at 2**30
    ]
    # After ENOSYS the C library falls back to an older call that the filter can check: clone instead of clone3.
    for table, answer in ((DENIED, _EPERM), (UNKNOWN, _ENOSYS)):
        for numbers in table.values():
            code += _when(numbers[column], [_return(answer)])
    for numbers in ONLY_SELF.values():
        code += _when(numbers[column], [_argument(0), *_unless(pid)])
    for numbers in ONLY_ZERO.values():
        code += _when(numbers[column], [_argument(0), *_unless(0)])
    for numbers in OWN_CLOCKS.values():
        code += _when(numbers[column], [_argument(0), _jump(_AT_LEAST, 2**31, 0, 1), _return(_EPERM), _return(_ALLOW)])
    for numbers, which, values in COMMANDS.values():
        tests = [step for value in values for step in _if(value, _ALLOW)]
        code += _when(numbers[column], [_argument(which), *tests, _return(_EPERM)])
    # MAP_LOCKED and MAP_POPULATE load pages of shared files, which other programs can observe. Huge pages are a shared
    # pool.
    code += _when(_MMAP[column], [_argument(3), _and(_MAP_LOCKED_POPULATE_HUGETLB), *_unless(0)])
    # The same call starts threads, which are allowed, and processes, which are not.
    code += _when(_CLONE[column], [_argument(0), _and(_CLONE_THREAD), *_unless(_CLONE_THREAD)])
    for numbers, which in ((_OPEN, 1), (_OPENAT, 2)):  # O_TRUNC empties a file even if it is opened for reading
        steps = [_argument(which), _and(_O_TRUNC_OR_WRITE), *_if(_O_TRUNC, _EPERM), _return(_ALLOW)]
        code += _when(numbers[column], steps)
    code += _when(_SOCKETPAIR[column], [_argument(0), *_unless(_AF_UNIX)])  # asyncio needs one
    # The address is a pointer, so both halves of the argument must be 0.
    steps = [_argument(4), _jump(_EQUAL, 0, 1, 0), _return(_EPERM), _load(16 + 8 * 4 + 4), *_unless(0)]
    code += _when(_SENDTO[column], steps)  # allowed within a socket pair, that is without an address
    return b"".join([*code, _return(_ALLOW)])


def _when(number: int, steps: list[bytes]) -> list[bytes]:
    """Instructions for one system call. They must end in a return."""
    return [_jump(_EQUAL, number, 0, len(steps)), *steps] if number >= 0 else []


def _unless(value: int) -> list[bytes]:
    return [_jump(_EQUAL, value, 1, 0), _return(_EPERM), _return(_ALLOW)]


def _if(value: int, answer: int) -> list[bytes]:
    return [_jump(_EQUAL, value, 0, 1), _return(answer)]


def _argument(which: int) -> bytes:
    """Load the low half of an argument, which is all that the kernel reads of an int."""
    return _load(16 + 8 * which)


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, offset)


def _and(mask: int) -> bytes:
    return struct.pack("HBBI", _AND, 0, 0, mask)


def _jump(kind: int, value: int, when_true: int, when_false: int) -> bytes:
    return struct.pack("HBBI", kind, when_true, when_false, value)


def _return(answer: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, answer)
