"""Programs that pass in plain Python, with tests that pass or inspect more than plain data; and for each a wrong one.

Each text contains the right program, the tests (one per paragraph) and the wrong program, separated by lines of dashes
and stars.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    right: str
    tests: tuple[str, ...]
    wrong: str


def _case(name: str, text: str) -> Case:
    right, rest = text.split("\n---\n")
    tests, wrong = rest.split("\n***\n")
    return Case(name=name, right=right, tests=tuple(tests.strip().split("\n\n")), wrong=wrong)


_TEXTS = {
    # ------------------------------------------------------------------------------------- functions as arguments
    "lambda": """
def apply(f, x): return f(x)
---
assert apply(lambda x: x * 2, 3) == 6
***
def apply(f, x): return f
""",
    "lambda called many times": """
def my_map(f, xs): return [f(x) for x in xs]
---
assert my_map(lambda x: x * x, range(50)) == [x * x for x in range(50)]
***
def my_map(f, xs): return [f(x) for x in xs][1:]
""",
    "predicate": """
def my_filter(f, xs): return [x for x in xs if f(x)]
---
assert my_filter(lambda x: x % 2, [1, 2, 3]) == [1, 3]

assert my_filter(str.isupper, ['A', 'b']) == ['A']
***
def my_filter(f, xs): return xs
""",
    "function of the tests": """
def twice(f): return lambda x: f(f(x))
---
def add_one(x):
    return x + 1
assert twice(add_one)(1) == 3

assert twice(twice(lambda x: 2 * x))(1) == 16
***
def twice(f): return f
""",
    "built-in functions": """
def fold(f, xs, start):
    for x in xs: start = f(start, x)
    return start
---
import operator
assert fold(operator.mul, [1, 2, 3, 4], 1) == 24

assert fold(max, [3, 9, 2], 0) == 9

assert fold(lambda n, x: n + len(x), ['a', 'bc'], 0) == 3
***
def fold(f, xs, start): return 24
""",
    "key function": """
def best(xs, key): return max(xs, key=key)
---
assert best(['a', 'ccc', 'bb'], len) == 'ccc'

assert best([1, -5, 3], key=lambda x: -x) == -5
***
def best(xs, key): return max(xs)
""",
    "callback that records": """
def walk(xs, visit):
    for x in xs:
        if isinstance(x, list): walk(x, visit)
        else: visit(x)
---
seen = []
walk([1, [2, [3]]], seen.append)
assert seen == [1, 2, 3]
***
def walk(xs, visit):
    for x in xs: visit(x)
""",
    "callback that raises": """
def safe(f):
    try: return f()
    except ZeroDivisionError: return None
---
assert safe(lambda: 1 / 0) is None

assert safe(lambda: 4) == 4

try:
    safe(lambda: [][1])
    assert False
except IndexError:
    assert safe(int) == 0
***
def safe(f):
    try: return f()
    except Exception: return None
""",
    "retry": """
def retry(f, times):
    for i in range(times):
        try: return f()
        except ValueError:
            if i == times - 1: raise
---
calls = []
def flaky():
    calls.append(1)
    if len(calls) < 3: raise ValueError('no')
    return 'ok'
assert retry(flaky, 5) == 'ok' and len(calls) == 3
***
def retry(f, times): return f()
""",
    "partial": """
def run(f, *args): return f(*args)
---
from functools import partial
assert run(partial(pow, 2), 5) == 32
***
def run(f, *args): return 25
""",
    "decorator": """
import functools
def logged(log):
    def wrap(f):
        @functools.wraps(f)
        def inner(*args):
            log(f.__name__)
            return f(*args)
        return inner
    return wrap
---
lines = []
@logged(lines.append)
def double(x):
    return 2 * x
assert double(4) == 8
assert lines == ['double'] and double.__name__ == 'double'
***
def logged(log):
    def wrap(f): return f
    return wrap
""",
    "memoize": """
def memoize(f):
    cache = {}
    def inner(x):
        if x not in cache: cache[x] = f(x)
        return cache[x]
    return inner
---
count = []
def slow(x):
    count.append(x)
    return x * x
fast = memoize(slow)
assert fast(3) == 9 and fast(3) == 9
assert count == [3]
***
def memoize(f): return f
""",
    "compose": """
def compose(*fs):
    def run(x):
        for f in reversed(fs): x = f(x)
        return x
    return run
---
assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11

assert compose()(5) == 5
***
def compose(*fs): return fs[0] if fs else (lambda x: x)
""",
    "root finding": """
def bisect(f, a, b):
    for _ in range(60):
        m = (a + b) / 2
        if f(a) * f(m) <= 0: b = m
        else: a = m
    return a
---
assert abs(bisect(lambda x: x * x - 2, 0.0, 2.0) - 2 ** 0.5) < 1e-9
***
def bisect(f, a, b): return (a + b) / 2
""",
    "curry": """
def curry(f): return lambda a: lambda b: f(a, b)
---
assert curry(lambda a, b: a - b)(5)(3) == 2
***
def curry(f): return lambda a: lambda b: f(b, a)
""",
    "event handlers": """
class Bus:
    def __init__(self): self.handlers = {}
    def on(self, name, f): self.handlers.setdefault(name, []).append(f)
    def emit(self, name, *args):
        return [f(*args) for f in self.handlers.get(name, [])]
---
bus = Bus()
got = []
bus.on('x', got.append)
bus.on('x', lambda v: v + 1)
assert bus.emit('x', 1) == [None, 2]
assert got == [1]
***
class Bus:
    def on(self, name, f): pass
    def emit(self, name, *args): return [None, 2]
""",
    # ------------------------------------------------------------------------------------- iterators
    "iterator as an argument": """
def first(n, xs): return [x for _, x in zip(range(n), xs)]
---
assert first(2, iter([1, 2, 3])) == [1, 2]

assert first(3, (x * x for x in range(10))) == [0, 1, 4]
***
def first(n, xs): return list(xs)
""",
    "endless iterator as an argument": """
import itertools
def upto(xs, most): return list(itertools.takewhile(lambda x: x < most, xs))
---
import itertools
assert upto(itertools.count(), 4) == [0, 1, 2, 3]
***
def upto(xs, most): return [next(xs) for _ in range(3)]
""",
    "map and zip as arguments": """
def total(pairs): return sum(a * b for a, b in pairs)
---
assert total(zip([1, 2], [3, 4])) == 11

assert total(map(lambda x: (x, x), [1, 2])) == 5

assert total(enumerate([5, 6])) == 6
***
def total(pairs): return 11
""",
    "dict views": """
def ordered(xs): return sorted(xs)
---
d = {'b': 2, 'a': 1}
assert ordered(d.keys()) == ['a', 'b']

assert ordered({'x': 3, 'y': 1}.values()) == [1, 3]

assert ordered({'b': 2, 'a': 1}.items()) == [('a', 1), ('b', 2)]
***
def ordered(xs): return ['a', 'b']
""",
    "generator": """
def count(n):
    for i in range(n): yield i
---
g = count(3)
assert next(g) == 0
assert list(g) == [1, 2]
assert list(g) == []
***
def count(n): return iter([0, 1, 2, 3])
""",
    "endless generator": """
def naturals():
    n = 0
    while True:
        yield n
        n += 1
---
import itertools
assert list(itertools.islice(naturals(), 5)) == [0, 1, 2, 3, 4]
***
def naturals():
    n = 1
    while True:
        yield n
        n += 1
""",
    "end of an iterator": """
def pair():
    yield 1
    yield 2
---
it = iter(pair())
assert [next(it), next(it)] == [1, 2]
try:
    next(it)
    assert False
except StopIteration:
    assert next(it, 'end') == 'end'
***
def pair():
    yield 1
    yield 2
    yield 3
""",
    "send": """
def averager():
    total, n, mean = 0, 0, None
    while True:
        x = yield mean
        total += x
        n += 1
        mean = total / n
---
g = averager()
next(g)
assert g.send(10) == 10.0
assert g.send(20) == 15.0
***
def averager():
    mean = None
    while True: mean = yield mean
""",
    "iterator class": """
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n <= 0: raise StopIteration
        self.n -= 1
        return self.n + 1
---
assert list(Countdown(3)) == [3, 2, 1]

total = 0
for x in Countdown(4):
    total += x
assert total == 10
***
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(range(self.n))
""",
    # ------------------------------------------------------------------------------------- data types
    "Fraction": """
from fractions import Fraction
def add(a, b): return Fraction(a) + Fraction(b)
---
from fractions import Fraction
assert add(Fraction(1, 3), Fraction(1, 6)) == Fraction(1, 2)

assert add('1/4', 1).numerator == 5
***
def add(a, b): return float(a) + 0.1
""",
    "Decimal": """
from decimal import Decimal
def price(net, tax): return (net * (1 + tax)).quantize(Decimal('0.01'))
---
from decimal import Decimal
assert price(Decimal('10.00'), Decimal('0.19')) == Decimal('11.90')

assert str(price(Decimal('1'), Decimal('0'))) == '1.00'
***
def price(net, tax): return net * (1 + tax)
""",
    "date": """
import datetime
def next_day(d): return d + datetime.timedelta(days=1)
---
from datetime import date
assert next_day(date(2024, 2, 28)) == date(2024, 2, 29)

assert next_day(date(2023, 12, 31)).year == 2024
***
def next_day(d): return d.replace(day=d.day + 1)
""",
    "datetime and timedelta": """
def between(a, b): return b - a
---
import datetime
assert between(datetime.datetime(2024, 1, 1, 12), datetime.datetime(2024, 1, 2)) == datetime.timedelta(hours=12)

assert between(datetime.date(2024, 1, 1), datetime.date(2024, 1, 8)).days == 7
***
def between(a, b): return a - b
""",
    "deque": """
from collections import deque
def rotate(d, n):
    d = deque(d)
    d.rotate(n)
    return d
---
from collections import deque
assert rotate(deque([1, 2, 3]), 1) == deque([3, 1, 2])

assert rotate(deque([1, 2]), 1).popleft() == 2
***
from collections import deque
def rotate(d, n): return deque(d)
""",
    "Counter": """
from collections import Counter
def letters(s): return Counter(s)
---
from collections import Counter
assert letters('aab') == Counter({'a': 2, 'b': 1})

assert letters('aab').most_common(1) == [('a', 2)]

assert letters('a')['z'] == 0
***
def letters(s): return {c: 1 for c in s}
""",
    "OrderedDict and defaultdict": """
from collections import OrderedDict, defaultdict
def order(pairs): return OrderedDict(sorted(pairs))
def group(words):
    found = defaultdict(list)
    for w in words: found[w[0]].append(w)
    return found
---
from collections import OrderedDict
assert order([('b', 1), ('a', 2)]) == OrderedDict([('a', 2), ('b', 1)])

assert list(order([('b', 1), ('a', 2)]).items())[0] == ('a', 2)

assert group(['ab', 'ac', 'b']) == {'a': ['ab', 'ac'], 'b': ['b']}

assert group([])['x'] == []
***
from collections import OrderedDict
def order(pairs): return OrderedDict(pairs)
def group(words): return {}
""",
    "namedtuple of the program": """
from collections import namedtuple
Point = namedtuple('Point', 'x y')
def mirror(p): return Point(-p.x, p.y)
---
assert mirror(Point(1, 2)) == Point(-1, 2)

assert mirror(Point(1, 2)).x == -1

assert Point(3, 4) == (3, 4)
x, y = Point(5, 6)
assert x + y == 11
***
from collections import namedtuple
Point = namedtuple('Point', 'x y')
def mirror(p): return p
""",
    "namedtuple of the tests": """
def area(r): return r.width * r.height
---
from collections import namedtuple
Rect = namedtuple('Rect', 'width height')
assert area(Rect(2, 3)) == 6
***
def area(r): return r.width + r.height
""",
    "Enum": """
import enum
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def other(c): return Color.BLUE if c is Color.RED else Color.RED
---
assert other(Color.RED) == Color.BLUE

assert other(Color.BLUE) is Color.RED

assert Color.RED.name == 'RED' and Color(2).value == 2

assert [c.name for c in Color] == ['RED', 'BLUE'] and len(Color) == 2
***
import enum
class Color(enum.Enum):
    RED = 1
    BLUE = 2
def other(c): return c
""",
    "IntEnum": """
import enum
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3
---
assert Level.HIGH > Level.LOW

assert Level.HIGH == 3 and Level.LOW.name == 'LOW'
***
import enum
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
""",
    "complex and bytes": """
def conj(z): return z.conjugate()
def flip(b): return bytes(reversed(b))
---
assert conj(1 + 2j) == 1 - 2j

assert flip(b'abc') == b'cba' and flip(bytearray(b'ab')) == b'ba'
***
def conj(z): return z
def flip(b): return b
""",
    # ------------------------------------------------------------------------------------- arguments changed in place
    "sort in place": """
def sort(xs):
    for i in range(len(xs)):
        for j in range(i):
            if xs[j] > xs[i]: xs[i], xs[j] = xs[j], xs[i]
---
xs = [3, 1, 2]
sort(xs)
assert xs == [1, 2, 3]
***
def sort(xs): return sorted(xs)
""",
    "returns None": """
def rotate(nums, k): nums[:] = nums[-k:] + nums[:-k]
---
nums = [1, 2, 3]
assert rotate(nums, 1) is None
assert nums == [3, 1, 2]
***
def rotate(nums, k): pass
""",
    "method that changes its argument": """
class Solution:
    def setZeroes(self, m):
        rows = {i for i, r in enumerate(m) if 0 in r}
        cols = {j for r in m for j, x in enumerate(r) if x == 0}
        for i, r in enumerate(m):
            for j in range(len(r)):
                if i in rows or j in cols: r[j] = 0
---
m = [[1, 2], [0, 4]]
first = m[0]
Solution().setZeroes(m)
assert m == [[0, 2], [0, 0]] and first == [0, 2]
***
class Solution:
    def setZeroes(self, m): return [[0, 2], [0, 0]]
""",
    "dict and set changed in place": """
def merge(into, other): into.update(other)
def prune(s):
    for x in [*s]:
        if x < 0: s.remove(x)
---
d = {'a': 1}
merge(d, {'b': 2})
assert d == {'a': 1, 'b': 2}

s = {1, -1}
prune(s)
assert s == {1}
***
def merge(into, other): return {**into, **other}
def prune(s): return {x for x in s if x >= 0}
""",
    "deque changed in place": """
def push(d, x): d.append(x)
---
from collections import deque
d = deque([1], maxlen=2)
push(d, 2)
push(d, x=3)
assert d == deque([2, 3])
***
def push(d, x): d.appendleft(x)
""",
    # ------------------------------------------------------------------------------------- classes of the tests
    "objects of the tests": """
def oldest(people): return max(people, key=lambda p: p.age)
---
class Person:
    def __init__(self, name, age):
        self.name, self.age = name, age
people = [Person('a', 3), Person('b', 9)]
assert oldest(people) is people[1]
assert oldest(people).name == 'b'
***
def oldest(people): return people[0]
""",
    "tree of the tests": """
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
---
class Node:
    def __init__(self, left=None, right=None):
        self.left, self.right = left, right
assert depth(Node(Node(), Node(Node()))) == 3

assert depth(None) == 0
***
def depth(node): return 3
""",
    "tree changed by the program": """
def invert(node):
    if node:
        node.left, node.right = invert(node.right), invert(node.left)
    return node
---
class Node:
    def __init__(self, value, left=None, right=None):
        self.value, self.left, self.right = value, left, right
root = invert(Node(1, Node(2), Node(3)))
assert (root.left.value, root.right.value) == (3, 2)
***
def invert(node): return node
""",
    "method of the tests": """
def speak(animals): return [a.sound() + '!' for a in animals]
---
class Dog:
    def sound(self): return 'wow'
class Cat(Dog):
    def sound(self): return 'mew'
assert speak([Dog(), Cat()]) == ['wow!', 'mew!']
***
def speak(animals): return ['wow!' for a in animals]
""",
    "operators of the tests": """
def order(xs): return sorted(xs)
def measure(x): return len(x), x[0], 2 in x, list(x), str(x)
---
class V:
    def __init__(self, n): self.n = n
    def __lt__(self, other): return self.n < other.n
a, b = V(2), V(1)
assert order([a, b]) == [b, a]

class L:
    def __len__(self): return 2
    def __getitem__(self, i): return [1, 2][i]
    def __iter__(self): return iter([1, 2])
    def __contains__(self, x): return x == 2
    def __str__(self): return 'L'
assert measure(L()) == (2, 1, True, [1, 2], 'L')
***
def order(xs): return xs
def measure(x): return len(x), x[0], 1 in x, list(x), str(x)
""",
    "callable of the tests": """
def call(f, x): return f(x)
---
class Adder:
    def __init__(self, n): self.n = n
    def __call__(self, x): return x + self.n
assert call(Adder(3), 4) == 7
***
def call(f, x): return x
""",
    "class of the tests as an argument": """
def build(kind, values): return [kind(v) for v in values]
---
class Box:
    def __init__(self, v): self.v = v
boxes = build(Box, [1, 2])
assert [b.v for b in boxes] == [1, 2] and isinstance(boxes[0], Box)
***
def build(kind, values): return values
""",
    "text file of the tests": """
def lines(f): return [line.strip() for line in f.read().split(chr(10)) if line]
---
import io
assert lines(io.StringIO('a\\nb \\n')) == ['a', 'b']
***
def lines(f): return [f.read()]
""",
    "random generator of the tests": """
def pick(rng, xs): return xs[rng.randrange(len(xs))]
---
import random
expected = [10, 20, 30][random.Random(5).randrange(3)]
assert pick(random.Random(5), [10, 20, 30]) == expected

expected = ['abcdef'[random.Random(i).randrange(6)] for i in range(9)]
assert [pick(random.Random(i), 'abcdef') for i in range(9)] == expected
***
def pick(rng, xs): return xs[0]
""",
    # ------------------------------------------------------------------------------------- exceptions
    "built-in exception": """
def root(x):
    if x < 0: raise ValueError('negative')
    return x ** 0.5
---
try:
    root(-1)
    assert False
except ValueError as e:
    assert str(e) == 'negative'
***
def root(x): raise ValueError('no')
""",
    "subclass of an exception": """
class TooSmall(ValueError): pass
def check(x):
    if x < 0: raise TooSmall('small')
    return x
---
try:
    check(-1)
    assert False
except ValueError as e:
    assert 'small' in str(e)

assert check(1) == 1
***
class TooSmall(Exception): pass
def check(x):
    if x < 0: raise TooSmall('small')
    return x
""",
    "exception class by its name": """
class EmptyError(Exception): pass
class Stack:
    def __init__(self): self.items = []
    def pop(self):
        if not self.items: raise EmptyError('empty stack')
        return self.items.pop()
---
raised = False
try:
    Stack().pop()
except EmptyError:
    raised = True
assert raised
assert issubclass(EmptyError, Exception)
***
class EmptyError(Exception): pass
class Stack:
    def pop(self): raise IndexError
""",
    "exception with attributes": """
class HTTPError(Exception):
    def __init__(self, code, text):
        super().__init__(f'{code}: {text}')
        self.code = code
def get(path):
    raise HTTPError(404, path)
---
try:
    get('/x')
    assert False
except HTTPError as e:
    assert e.code == 404
    assert str(e) == '404: /x'
    assert isinstance(e, HTTPError) and e.args == ('404: /x',)
***
class HTTPError(Exception):
    code = 500
def get(path): raise HTTPError(path)
""",
    "hierarchy of exceptions": """
class BankError(Exception): pass
class NoFunds(BankError, ValueError):
    def __str__(self): return 'no funds'
class Account:
    def __init__(self): self.balance = 0
    def take(self, n):
        if n > self.balance: raise NoFunds
        self.balance -= n
---
caught = []
for kind in (NoFunds, BankError, ValueError):
    try:
        Account().take(5)
    except kind as e:
        caught.append(str(e))
assert caught == ['no funds'] * 3

assert Account().take(0) is None
***
class BankError(Exception): pass
class NoFunds(BankError): pass
class Account:
    balance = 0
    def take(self, n): raise NoFunds('no funds')
""",
    "KeyError": """
class Registry:
    def __init__(self): self.d = {}
    def get(self, name): return self.d[name]
---
try:
    Registry().get('x')
    assert False
except KeyError as e:
    assert e.args == ('x',) and str(e) == "'x'"
***
class Registry:
    def get(self, name): raise KeyError('y')
""",
    "exception class as an argument": """
def raises(f, kind):
    try: f()
    except kind: return True
    except Exception: return False
    return False
---
assert raises(lambda: {}['x'], KeyError) is True

assert raises(lambda: {}['x'], ValueError) is False
***
def raises(f, kind): return True
""",
    "exception chain": """
def load(text):
    try: return int(text)
    except ValueError as e: raise RuntimeError('bad') from e
---
try:
    load('x')
    assert False
except RuntimeError as e:
    assert str(e) == 'bad'
assert load('7') == 7
***
def load(text): return int(text)
""",
    # ------------------------------------------------------------------------------------- operators of the program
    "vector": """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __eq__(self, o): return isinstance(o, Vector) and (self.x, self.y) == (o.x, o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __neg__(self): return self * -1
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __repr__(self): return f'Vector({self.x}, {self.y})'
---
assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6)

assert 2 * Vector(1, 2) == Vector(1, 2) * 2 == Vector(2, 4)

assert Vector(1, 2) != Vector(2, 1)

assert abs(Vector(3, 4)) == 5 and -Vector(1, 2) == Vector(-1, -2)

assert repr(Vector(1, 2)) == 'Vector(1, 2)'
***
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return self
    def __eq__(self, o): return True
    __mul__ = __rmul__ = __add__
    def __neg__(self): return self
    def __abs__(self): return 5
    def __repr__(self): return 'Vector(1, 2)'
""",
    "comparison": """
import functools
@functools.total_ordering
class Version:
    def __init__(self, text): self.parts = [int(p) for p in text.split('.')]
    def __eq__(self, o): return self.parts == o.parts
    def __lt__(self, o): return self.parts < o.parts
---
assert Version('1.2') < Version('1.10')

assert not Version('2.0') < Version('1.10')

assert Version('1.2') >= Version('1.2')

assert sorted([Version('1.10'), Version('1.2')])[0].parts == [1, 2]

assert max(Version('3.0'), Version('2.9')).parts == [3, 0]
***
import functools
@functools.total_ordering
class Version:
    def __init__(self, text): self.parts = text
    def __eq__(self, o): return self.parts == o.parts
    def __lt__(self, o): return self.parts < o.parts
""",
    "container": """
class Bag:
    def __init__(self, *items): self.items = list(items)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __delitem__(self, i): del self.items[i]
    def __contains__(self, x): return x in self.items
    def __iter__(self): return iter(self.items)
    def __bool__(self): return bool(self.items)
---
b = Bag(1, 2, 3)
assert len(b) == 3 and b[0] == 1 and b[-1] == 3
b[0] = 9
del b[1]
assert list(b) == [9, 3]
assert 9 in b and 2 not in b
assert b and not Bag()
assert b[0:1] == [9]
***
class Bag(list):
    def __init__(self, *items): self.items = list(items)
    def __len__(self): return 3
    def __contains__(self, x): return True
""",
    "hash and sets": """
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)
    def __hash__(self): return hash((self.x, self.y))
---
assert len({Point(1, 2), Point(1, 2), Point(2, 1)}) == 2

d = {Point(1, 2): 'a'}
assert d[Point(1, 2)] == 'a' and Point(3, 3) not in d
***
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
""",
    "dataclass": """
from dataclasses import dataclass, field
@dataclass(order=True)
class Item:
    price: float
    name: str = ''
    tags: list = field(default_factory=list)
def cheapest(items): return min(items)
---
assert cheapest([Item(2.0, 'b'), Item(1.0, 'a')]) == Item(1.0, 'a')

assert Item(1.0).tags == [] and Item(1.0, 'x').name == 'x'

assert repr(Item(1.0, 'a')) == "Item(price=1.0, name='a', tags=[])"
***
from dataclasses import dataclass, field
@dataclass(order=True)
class Item:
    price: float
    name: str = ''
    tags: list = field(default_factory=list)
def cheapest(items): return max(items)
""",
    "matrix": """
class Matrix:
    def __init__(self, rows): self.rows = rows
    def __matmul__(self, o):
        return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])
    def __getitem__(self, at): return self.rows[at[0]][at[1]]
    def __eq__(self, o): return self.rows == o.rows
    @property
    def T(self): return Matrix([list(c) for c in zip(*self.rows)])
    @classmethod
    def identity(cls, n): return cls([[int(i == j) for j in range(n)] for i in range(n)])
---
m = Matrix([[1, 2], [3, 4]])
assert (m @ m).rows == [[7, 10], [15, 22]]
assert m[1, 0] == 3
assert m.T.rows == [[1, 3], [2, 4]]
assert m @ Matrix.identity(2) == m
***
class Matrix:
    def __init__(self, rows): self.rows = rows
    def __matmul__(self, o): return self
    def __getitem__(self, at): return 3
    def __eq__(self, o): return True
    T = property(lambda self: self)
    identity = classmethod(lambda cls, n: cls([]))
""",
    "in-place operators": """
class Counter2:
    def __init__(self, n=0): self.n = n
    def __iadd__(self, k):
        self.n += k
        return self
    def __int__(self): return self.n
    def __float__(self): return self.n / 1
    def __round__(self, d=None): return self.n
    def __index__(self): return self.n
---
c = Counter2()
c += 5
assert c.n == 5 and int(c) == 5 and float(c) == 5.0 and round(c) == 5
assert [0, 1, 2, 3, 4, 5][c] == 5
***
class Counter2:
    def __init__(self, n=0): self.n = n
    def __iadd__(self, k): return self
    def __int__(self): return 5
""",
    "money against numbers": """
class Money:
    def __init__(self, n): self.n = n
    def __lt__(self, o): return self.n < (o.n if isinstance(o, Money) else o)
    def __gt__(self, o): return self.n > (o.n if isinstance(o, Money) else o)
    def __radd__(self, k): return Money(self.n + k)
    def __add__(self, o): return Money(self.n + (o.n if isinstance(o, Money) else o))
    def __format__(self, spec): return format(self.n, spec or '.2f')
---
assert Money(3) < 5 and not Money(7) < 5

assert sum([Money(1), Money(2)]).n == 3

assert f'{Money(3)}' == '3.00' and f'{Money(3):.1f}' == '3.0' and '{}'.format(Money(1)) == '1.00'
***
class Money:
    def __init__(self, n): self.n = n
    def __lt__(self, o): return True
    def __radd__(self, k): return self
    __add__ = __radd__
""",
    "isinstance and type": """
class Shape:
    def area(self): raise NotImplementedError
class Square(Shape):
    def __init__(self, a): self.a = a
    def area(self): return self.a ** 2
---
s = Square(3)
assert isinstance(s, Square) and isinstance(s, Shape)
assert not isinstance(Shape(), Square)
assert s.area() == 9
assert type(s) is Square and type(s).__name__ == 'Square'
assert s.__class__.__name__ == 'Square' and issubclass(Square, Shape)
try:
    Shape().area()
    assert False
except NotImplementedError:
    pass
***
class Shape:
    def area(self): return 9
class Square(Shape):
    def __init__(self, a): self.a = a
""",
    "context manager": """
class Tag:
    def __init__(self, name, out): self.name, self.out = name, out
    def __enter__(self):
        self.out('<' + self.name + '>')
        return self
    def __exit__(self, kind, error, tb):
        self.out('</' + self.name + '>')
        return kind is ValueError
---
out = []
with Tag('a', out.append) as tag:
    out.append(tag.name)
    raise ValueError('swallowed')
assert out == ['<a>', 'a', '</a>']
***
class Tag:
    def __init__(self, name, out): self.name, self.out = name, out
    def __enter__(self): return self
    def __exit__(self, *e): return True
""",
    "context manager from a generator": """
import contextlib
@contextlib.contextmanager
def doubled(xs):
    yield [2 * x for x in xs]
---
with doubled([1, 2]) as d:
    assert d == [2, 4]
***
import contextlib
@contextlib.contextmanager
def doubled(xs):
    yield xs
""",
    "subclass of a list": """
class Stack(list):
    def push(self, x): self.append(x)
    def peek(self): return self[-1]
---
s = Stack()
s.push(1)
s.push(2)
assert s.peek() == 2 and len(s) == 2 and s == [1, 2]
assert s.pop() == 2 and list(s) == [1]
***
class Stack(list):
    def push(self, x): pass
    def peek(self): return 2
    def __len__(self): return 2
""",
    "subclass of a dict": """
class Attrs(dict):
    def __getattr__(self, name): return self[name]
---
a = Attrs(x=1)
assert a.x == 1 and a == {'x': 1}
a['y'] = 2
assert a.y == 2 and sorted(a) == ['x', 'y']
***
class Attrs(dict):
    x = 1
""",
    # ------------------------------------------------------------------------------------- other objects
    "stack": """
class Stack:
    def __init__(self): self._items = []
    def push(self, x): self._items.append(x)
    def pop(self): return self._items.pop()
    def is_empty(self): return not self._items
---
s = Stack()
assert s.is_empty()
s.push([1])
s.push(2)
assert not s.is_empty()
assert s.pop() == 2 and s.pop() == [1]
***
class Stack:
    def push(self, x): pass
    def pop(self): return 2
    def is_empty(self): return True
""",
    "linked list": """
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def build(xs):
    head = None
    for x in reversed(xs): head = Node(x, head)
    return head
def reverse(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
---
node = reverse(build([1, 2, 3]))
values = []
while node:
    values.append(node.value)
    node = node.next
assert values == [3, 2, 1]
***
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def build(xs): return Node(1, Node(2, Node(3)))
def reverse(head): return head
""",
    "names that the judge could be using itself": """
class Till:
    def __init__(self): self._items, self._link, self._kind, self._number, self._held = [1], 2, 3, 4, 5
    def change(self, x): return x + 1
    def send(self, x): return x + 2
    def ask(self, x): return x + 3
---
t = Till()
assert (t._items, t._link, t._kind, t._number, t._held) == ([1], 2, 3, 4, 5)
assert (t.change(1), t.send(1), t.ask(1)) == (2, 3, 4)
t._items = 9
assert t._items == 9
***
class Till:
    _items = _link = _kind = _number = _held = 1
    change = send = ask = lambda self, x: x + 1
""",
    "closure with state": """
def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
---
a, b = counter(), counter()
assert [a(), a(), b()] == [1, 2, 1]
***
def counter(): return lambda: 1
""",
    "property and static method": """
class Circle:
    unit = 'cm'
    def __init__(self, r): self.r = r
    @property
    def d(self): return 2 * self.r
    @d.setter
    def d(self, v): self.r = v / 2
    @staticmethod
    def valid(r): return r > 0
    @classmethod
    def from_diameter(cls, d): return cls(d / 2)
---
c = Circle(2)
c.d = 10
assert c.r == 5 and c.d == 10
assert Circle.valid(1) is True and Circle.valid(-1) is False
assert Circle.from_diameter(4).r == 2 and Circle.unit == 'cm'
assert hasattr(c, 'd') and not hasattr(c, 'nothing') and getattr(c, 'nothing', 7) == 7
***
class Circle:
    unit = 'cm'
    def __init__(self, r): self.r = self.d = r
    valid = staticmethod(lambda r: True)
    from_diameter = classmethod(lambda cls, d: cls(2))
""",
    "singleton": """
class Config:
    _one = None
    def __new__(cls):
        if cls._one is None: cls._one = super().__new__(cls)
        return cls._one
---
assert Config() is Config()
c = Config()
c.x = 5
assert Config().x == 5
***
class Config: pass
""",
    "copies of objects": """
class Tree:
    def __init__(self, v, kids=()): self.v, self.kids = v, list(kids)
    def __eq__(self, o): return self.v == o.v and self.kids == o.kids
---
import copy
t = Tree(1, [Tree(2)])
u = copy.deepcopy(t)
assert u == t and u is not t
u.kids[0].v = 5
assert t.kids[0].v == 2 and u != t
***
class Tree:
    def __init__(self, v, kids=()): self.v, self.kids = v, list(kids)
    def __eq__(self, o): return True
    def __deepcopy__(self, memo): return self
""",
    "objects in containers": """
class Job:
    def __init__(self, name, need): self.name, self.need = name, need
def order(jobs): return sorted(jobs, key=lambda j: j.need)
def by_name(jobs): return {j.name: j for j in jobs}
---
a, b = Job('a', 2), Job('b', 1)
assert [j.name for j in order([a, b])] == ['b', 'a']
assert order([a, b])[0] is b
assert by_name([a, b])['a'].need == 2
***
class Job:
    def __init__(self, name, need): self.name, self.need = name, need
def order(jobs): return jobs
def by_name(jobs): return {'a': jobs[0]}
""",
    "abstract class": """
import abc
class Base(abc.ABC):
    @abc.abstractmethod
    def run(self): ...
class Real(Base):
    def run(self): return 'ran'
---
try:
    Base()
    assert False
except TypeError:
    assert Real().run() == 'ran'
***
class Base:
    def run(self): ...
class Real(Base):
    def run(self): return 'ran'
""",
    # ------------------------------------------------------------------------------------- async
    "async function": """
import asyncio
async def double(x):
    await asyncio.sleep(0)
    return 2 * x
---
import asyncio
assert asyncio.run(double(4)) == 8
***
async def double(x): return x
""",
    "async together": """
import asyncio
async def work(x):
    await asyncio.sleep(0)
    if x < 0: raise ValueError('negative')
    return x + 1
---
import asyncio
async def main():
    return await asyncio.gather(work(1), work(2))
assert asyncio.run(main()) == [2, 3]

async def fails():
    try:
        await work(-1)
    except ValueError as e:
        return str(e)
assert asyncio.run(fails()) == 'negative'
***
async def work(x): return x
""",
    # ------------------------------------------------------------------------------------- ways to write tests
    "test function": """
def add(a, b): return a + b
---
def test_add():
    for a, b, c in [(1, 2, 3), ('a', 'b', 'ab')]:
        assert add(a, b) == c, f'add({a}, {b})'
test_add()
***
def add(a, b): return 3
""",
    "unpacking and sorting of results": """
def split(xs): return [x for x in xs if x < 0], [x for x in xs if x >= 0]
---
neg, pos = split([3, -1, 2])
assert neg == [-1]
assert sorted(pos) == [2, 3]
***
def split(xs): return xs, xs
""",
}
CASES = [_case(name, text) for name, text in _TEXTS.items()]
