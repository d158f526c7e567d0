"""Synthetic stand-ins for the two Azure traces of 2023, for where the data files are absent.

Made to have the real ones' mean rate, burstiness and length distributions, not their course in time: a stand-in
of another seed is another hour of such a service, quieter or busier. Input and output lengths are independent (the
real ones correlate by -0.11 and 0.00). What the code stand-in does not have is the real one's sharpest second:
about 40 requests, where the real one had 67 once.

Where the numbers come from: AzurePublicDataset b469a11, AzureLLMInferenceTrace_conv.csv and _code.csv (CC BY 4.0;
Patel et al., Splitwise, ISCA 2024), of which only these statistics are here.

* conv: the rate as measured; the gaps' cv, the modulation and its correlation time chosen so that over many seeds
  CV and IoD at 1, 10 and 60 s are about the real trace's (1.09; 1.4, 3.9, 16.1).
* code: the trace cut where a gap is over 3 s. Mean length of a burst and of a silence, the silences' cv, requests
  per second of burst, the cv of gaps in bursts, and the cv of the rate between bursts of over 20 requests, all
  as measured.
* lengths: lower order statistics, ``_QUANTILES``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fingerprint.errors import NotFoundError
from traces.arrivals import ArrivalProcess, Drifting, OnOff
from traces.generate import generate
from traces.lengths import LengthModel, QuantileLengths
from traces.request import Request

__all__ = ["STANDINS", "StandIn", "standin"]


@dataclass(frozen=True)
class StandIn:
    """A synthetic trace: the laws, and how long the real one is."""

    describes: str
    arrivals: ArrivalProcess
    lengths: LengthModel
    duration_s: float

    def requests(self, *, seed: int = 0, duration_s: float | None = None) -> Iterator[Request]:
        """Yield the stream, as long as the real trace by default."""
        length_s = self.duration_s if duration_s is None else duration_s
        return generate(self.arrivals, self.lengths, seed=seed, duration_s=length_s)


def standin(name: str) -> StandIn:
    """Return a stand-in by name.

    Raises:
        NotFoundError: there is none of that name.
    """
    if name not in STANDINS:
        raise NotFoundError(f"there is no synthetic trace {name!r}; there are {', '.join(STANDINS)}")
    return STANDINS[name]


# Fraction; input and output tokens of conv; of code.
_QUANTILES = (
    (0, 2, 7, 3, 6),
    (0.005, 16, 14, 12, 6),
    (0.01, 29, 16, 17, 6),
    (0.025, 120, 28, 44, 6),
    (0.05, 181, 41, 75, 6),
    (0.1, 207, 54, 147, 7),
    (0.15, 372, 67, 232, 7),
    (0.2, 387, 77, 385, 8),
    (0.25, 396, 85, 578, 9),
    (0.3, 403, 91, 770, 9),
    (0.35, 414, 96, 938, 10),
    (0.4, 703, 103, 1075, 11),
    (0.45, 984, 113, 1261, 12),
    (0.5, 1020, 129, 1469, 13),
    (0.55, 1045, 151, 1690, 14),
    (0.6, 1071, 177, 1909, 16),
    (0.65, 1097, 217, 2163, 18),
    (0.7, 1130, 384, 2433, 20),
    (0.75, 1189, 395, 2744, 24),
    (0.8, 1315, 400, 3192, 29),
    (0.85, 1876, 411, 3919, 39),
    (0.9, 2734, 424, 5186, 55),
    (0.95, 4083, 451, 7302, 90),
    (0.975, 4092, 522, 7435, 145),
    (0.99, 4142, 601, 7436, 249),
    (0.995, 4831, 643, 7436, 343),
    (0.999, 6122, 954, 7437, 824),
    (1, 14050, 1000, 7437, 1899),
)


def _lengths(input_column: int) -> QuantileLengths:
    inputs, outputs = (
        tuple((row[0], float(row[column])) for row in _QUANTILES) for column in (input_column, input_column + 1)
    )
    return QuantileLengths(inputs, outputs)


STANDINS: dict[str, StandIn] = {
    "azure-conv": StandIn(
        "like Azure's conversation trace of 2023: 58 minutes, 5.5 requests/s, slowly moving",
        Drifting(rate_per_s=5.53, modulation_cv=0.25, correlation_s=400.0, cv=1.05),
        _lengths(1),
        duration_s=3501.7,
    ),
    "azure-code": StandIn(
        "like Azure's code trace of 2023: 57 minutes, 2.6 requests/s, in bursts",
        OnOff(rate_per_s=9.577, on_s=12.79, off_s=35.42, cv=1.918, rate_cv=0.387, off_cv=1.268),
        _lengths(3),
        duration_s=3435.9,
    ),
}
