"""Synthetic stand-ins for the two Azure traces of 2023, for where the data files are absent.

Made to have the real ones' mean rate, burstiness and length distributions, not their course in time: a stand-in
of another seed is another hour of such a service, quieter or busier. Input and output lengths are independent (the
real ones correlate by -0.11 and 0.00). What the code stand-in does not have is the real one's sharpest second:
40 requests on average over seeds, where the real one had 67 once.

Where the numbers come from: AzurePublicDataset b469a11, AzureLLMInferenceTrace_conv.csv and _code.csv (CC BY 4.0;
Patel et al., Splitwise, ISCA 2024), of which only these statistics are here.

* conv: the rate as measured; the gaps' cv, the modulation and its correlation time chosen so that the mean over
  many seeds of CV and of IoD at 1, 10 and 60 s is about the real trace's (1.09; 1.4, 3.9, 16.1).
* code: the trace cut where a gap is over 3 s. Mean length of a burst and of a silence, the silences' cv, requests
  per second of burst, the cv of gaps in bursts, and the cv of the rate between bursts of over 20 requests, all
  as measured.
* lengths: lower order statistics at the fractions of ``_FRACTIONS``.
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
        """The stream; as long as the real trace unless told otherwise."""
        length_s = self.duration_s if duration_s is None else duration_s
        return generate(self.arrivals, self.lengths, seed=seed, duration_s=length_s)


def standin(name: str) -> StandIn:
    """A stand-in by name.

    Raises:
        NotFoundError: there is none of that name.
    """
    if name not in STANDINS:
        raise NotFoundError(f"there is no synthetic trace {name!r}; there are {', '.join(STANDINS)}")
    return STANDINS[name]


_FRACTIONS = (
    0,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.35,
    0.4,
    0.45,
    0.5,
    0.55,
    0.6,
    0.65,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
    0.95,
    0.975,
    0.99,
    0.995,
    0.999,
    1,
)
_CONV_INPUT = (
    2,
    16,
    29,
    120,
    181,
    207,
    372,
    387,
    396,
    403,
    414,
    703,
    984,
    1020,
    1045,
    1071,
    1097,
    1130,
    1189,
    1315,
    1876,
    2734,
    4083,
    4092,
    4142,
    4831,
    6122,
    14050,
)
_CONV_OUTPUT = (
    7,
    14,
    16,
    28,
    41,
    54,
    67,
    77,
    85,
    91,
    96,
    103,
    113,
    129,
    151,
    177,
    217,
    384,
    395,
    400,
    411,
    424,
    451,
    522,
    601,
    643,
    954,
    1000,
)
_CODE_INPUT = (
    3,
    12,
    17,
    44,
    75,
    147,
    232,
    385,
    578,
    770,
    938,
    1075,
    1261,
    1469,
    1690,
    1909,
    2163,
    2433,
    2744,
    3192,
    3919,
    5186,
    7302,
    7435,
    7436,
    7436,
    7437,
    7437,
)
_CODE_OUTPUT = (
    6,
    6,
    6,
    6,
    6,
    7,
    7,
    8,
    9,
    9,
    10,
    11,
    12,
    13,
    14,
    16,
    18,
    20,
    24,
    29,
    39,
    55,
    90,
    145,
    249,
    343,
    824,
    1899,
)


def _lengths(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> QuantileLengths:
    return QuantileLengths(
        tuple(zip(_FRACTIONS, inputs, strict=True)), tuple(zip(_FRACTIONS, outputs, strict=True))
    )


STANDINS: dict[str, StandIn] = {
    "azure-conv": StandIn(
        "like Azure's conversation trace of 2023: 58 minutes, 5.5 requests/s, slowly moving",
        Drifting(rate_per_s=5.53, modulation_cv=0.25, correlation_s=400.0, cv=1.05),
        _lengths(_CONV_INPUT, _CONV_OUTPUT),
        duration_s=3501.7,
    ),
    "azure-code": StandIn(
        "like Azure's code trace of 2023: 57 minutes, 2.6 requests/s, in bursts",
        OnOff(rate_per_s=9.577, on_s=12.79, off_s=35.42, cv=1.918, rate_cv=0.387, off_cv=1.268),
        _lengths(_CODE_INPUT, _CODE_OUTPUT),
        duration_s=3435.9,
    ),
}
