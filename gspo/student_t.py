"""The quantile of Student's t distribution that 95 % intervals of means use.

In: the degrees of freedom. Out: the 97.5 % quantile. Invariant: imports nothing, so that reports need neither scipy nor
torch.
"""

from __future__ import annotations

# A table, so that a report does not need scipy.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
)  # fmt: skip
"""The 97.5 % quantile of Student's t for 1 to 20 degrees of freedom."""


def t_point(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. Beyond the table: Cornish-Fisher expansion, accurate to four digits."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
